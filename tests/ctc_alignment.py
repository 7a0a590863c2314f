"Viterbi alignment of labels with frames, in plain NumPy: an oracle for the times of a search."

import numpy as np

from b2t_kaggle.core.ctc import check_log_probs


def align(
    log_probs: np.ndarray, # Log-probabilities [T', K]
    class_ids: np.ndarray, # Labels [S], without blanks
) -> np.ndarray:           # First and last frame of each label [S, 2]
    "Viterbi alignment of labels with frames (Viterbi, 1967); raises `ValueError` if there are too few frames."
    log_probs = check_log_probs(log_probs)
    ids = np.asarray(class_ids)
    states = np.zeros(2*len(ids) + 1, dtype=int) # A blank before, between and after the labels
    states[1::2] = ids
    skips_blank = np.zeros(len(states), dtype=bool) # States that may follow without the blank before them
    skips_blank[3::2] = ids[1:] != ids[:-1]
    score = np.full(len(states), -np.inf)
    score[0] = 0.0
    steps = [] # States by which the best path to each state advances in each frame: 0, 1 or 2
    for frame in log_probs:
        one_before = np.append(-np.inf, score[:-1])
        two_before = np.append([-np.inf]*2, score[:-2])[:len(score)]
        sources = np.stack([score, one_before, np.where(skips_blank, two_before, -np.inf)])
        steps.append(sources.argmax(0))
        score = sources.max(0) + frame[states]
    ends_in_blank = len(states) == 1 or score[-1] >= score[-2]
    state = len(states) - 1 if ends_in_blank else len(states) - 2
    if score[state] == -np.inf: raise ValueError(f'{len(log_probs)} frames are too few for {len(ids)} labels')
    path = np.empty(len(log_probs), dtype=int)
    for t in range(len(log_probs) - 1, -1, -1):
        path[t] = state
        state -= steps[t][state]
    frames_of = [np.flatnonzero(path == 2*i + 1) for i in range(len(ids))]
    return np.array([[frames[0], frames[-1]] for frames in frames_of]).reshape(-1, 2)
