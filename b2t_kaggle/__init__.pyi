"Public names, for type checkers; at run time they are imported at first use."
__version__: str
from b2t_kaggle.config import Config as Config, load_config as load_config, preset as preset
from b2t_kaggle.data.simulate import simulate_dataset as simulate_dataset
from b2t_kaggle.data.store import TrialStore as TrialStore
from b2t_kaggle.decoding.decoder import Hypothesis as Hypothesis, LexiconBeamDecoder as LexiconBeamDecoder
from b2t_kaggle.decoding.streaming import Stream as Stream
from b2t_kaggle.lm.automaton import load_ngram as load_ngram
from b2t_kaggle.lm.ngram import NGram as NGram, build_ngram as build_ngram
from b2t_kaggle.logits import LogitStore as LogitStore
from b2t_kaggle.metrics import phoneme_error_rate as phoneme_error_rate, word_error_rate as word_error_rate
from b2t_kaggle.phonemes import build_lexicon as build_lexicon, normalize_sentence as normalize_sentence, sentence_to_phonemes as sentence_to_phonemes
from b2t_kaggle.pipeline.explore import listen as listen, open_run as open_run
from b2t_kaggle.pipeline.frameworks import infer as infer, train as train
from b2t_kaggle.rescoring.combine import combine as combine
from b2t_kaggle.pipeline.submission import validate_submission as validate_submission, write_submission as write_submission
