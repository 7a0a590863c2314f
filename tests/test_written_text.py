"Curly apostrophes, long dashes, hard spaces and accents in any input give the same words as plain text."
import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from b2t_kaggle.cli.command import main
from b2t_kaggle.data.sessions import Trial, read_session, write_session
from b2t_kaggle.lm.corpus import clean_sentence, clean_text, read_sentences, read_vocabulary, vocabulary
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.metrics.comparison import with_seen
from b2t_kaggle.phonemes import build_lexicon, sentence_to_phonemes, to_class_ids
from b2t_kaggle.pipeline.submission import SubmissionError, validate_submission, write_submission
from b2t_kaggle.rescoring.hypotheses import read_hypotheses, vote

WRITTEN = 'I don’t know—it´s caf\u00e9\u00a0time… “wait”'
PLAIN = "i don't know it's cafe time wait"


@pytest.fixture
def text(tmp_path):
    (tmp_path/'text.txt').write_text(f'\ufeff{WRITTEN}\n'*3, encoding='utf-8')
    return tmp_path/'text.txt'


def test_texts_of_a_language_model(text, tmp_path):
    assert set(read_sentences(text)) == {PLAIN} and set(vocabulary(text)) == set(PLAIN.split())
    assert list(read_sentences(['don`t\tgo', 'a `quoted` word'])) == ["don't go", 'a quoted word']
    assert clean_sentence(WRITTEN) == PLAIN
    assert list(clean_text(text, lexicon=WRITTEN.split())) == [PLAIN]*3
    path = build_ngram(text, tmp_path/'lm.arpa', order=2, vocab=['Don’t', 'know', 'it’s'])
    words = {line.split('\t')[1] for line in path.read_text().split('\\2-grams:')[0].splitlines() if '\t' in line}
    assert words == {'<s>', '</s>', '<unk>', "don't", 'know', "it's"}


def test_words_of_a_list(tmp_path):
    words = '\ufeff;;; comment\nDon’t  D OW N T\ncaf\u00e9\nmerry‐go‐round(2)\ndon`t\n'
    (tmp_path/'words').write_text(words, encoding='utf-8')
    assert read_vocabulary(tmp_path/'words') == ["don't", 'cafe', 'merry-go-round']
    assert build_lexicon(['Don’t', 'caf\u00e9']) == build_lexicon(["don't", 'cafe'])


def test_labels_of_a_session(tmp_path):
    phonemes = sentence_to_phonemes(PLAIN)
    assert sentence_to_phonemes(WRITTEN) == phonemes
    path = tmp_path/'t15.2023.08.11'/'data_train.hdf5'
    write_session(path, [Trial('t15.2023.08.11', 'train', 'trial_0000', 1, 0, np.zeros((40, 512), np.float32),
                               to_class_ids(phonemes), WRITTEN)])
    trial, = read_session(path)
    assert trial.sentence == WRITTEN and set(read_sentences([trial.sentence])) == {PLAIN}


def test_error_rates_treat_both_sides_alike():
    assert word_error_rate([WRITTEN, PLAIN, WRITTEN], [PLAIN, WRITTEN, WRITTEN]) == 0
    assert word_error_rate(['don’t go'], ['dont go']) == .5


@pytest.mark.parametrize('name, content', [
    ('a.csv', f'\ufeffid,text\n0,"{WRITTEN.replace("“", "").replace("”", "")}"\n1,so\u2028it is\n'),
    ('a.txt', f'\ufeff{WRITTEN}\nso\u2028it is\n'),
    ('a.jsonl', ''.join(json.dumps({'trial': t, 'text': text}, ensure_ascii=False) + '\n'
                        for t, text in [(0, WRITTEN), (1, 'so\u2028it is')])),
])
def test_sentences_of_other_systems(name, content, tmp_path):
    "A line separator inside a sentence does not end a line, or the numbers of later trials would shift."
    (tmp_path/name).write_text(content, encoding='utf-8')
    (tmp_path/'b.txt').write_text(f'{PLAIN}\nso it is\n')
    hypotheses = read_hypotheses(tmp_path/name, tmp_path/'b.txt')
    assert vote(hypotheses) == [PLAIN, 'so it is']
    out = tmp_path/'out.csv'
    done = CliRunner().invoke(main, ['combine-files', str(tmp_path/name), '-o', str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == f'id,text\n0,{PLAIN}\n1,so it is\n' and validate_submission(out, 2) == []


def test_a_submission_is_plain(tmp_path):
    with pytest.raises(SubmissionError, match='apply normalize_sentence'):
        write_submission(tmp_path/'s.csv', [WRITTEN])


def test_sentences_that_were_seen():
    results = pd.DataFrame(dict(reference=[PLAIN], text=['']), index=['0'])
    assert with_seen(results, [WRITTEN]).seen.tolist() == [True]
