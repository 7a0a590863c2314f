"""Docstrings start with nouns or verbs, give shapes of arrays and name sources of methods; prose has none of the old
habits."""
import ast
import io
import json
import re
import tokenize
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent/'b2t_kaggle'
FILES = [p for p in sorted(PACKAGE.rglob('*.py')) if p.name != '_modidx.py']

ARRAY = re.compile(r'\b(ndarray|NDArray|Tensor|Ragged|Arrays?)\b')
# `[B, T, F]`, `[n]`, `[2·n − 1]`, `[…, K]`, `[]`; no index such as a footnote's `[tf]`
SHAPE = re.compile(r'\[(?!tf\])[^\[\]]*\]')

# Module, or function or class in it, -> author and year of what it implements
SOURCES = {
    'b2t_kaggle.config.encoders.transformer.TransformerConfig': 'Feghhi et al. 2025',
    'b2t_kaggle.config.encoders.transformer.position_buckets': 'Raffel et al. 2020',
    'b2t_kaggle.config.encoders.zipformer.ZipformerConfig': 'Yao et al. 2024',
    'b2t_kaggle.decoding.acoustic.align': 'Viterbi 1967',
    'b2t_kaggle.core.ctc.collapse': 'Graves et al. 2006',
    'b2t_kaggle.core.ctc.greedy': 'Graves et al. 2006',
    'b2t_kaggle.decoding.acoustic.acoustic_scores': 'Graves et al. 2006',
    'b2t_kaggle.decoding.decoder.LexiconBeamDecoder': 'Hannun et al. 2014',
    'b2t_kaggle.decoding.histories.HistoryScorer': 'Hori et al. 2025',
    'b2t_kaggle.decoding.lexicon._look_ahead': 'Ortmanns et al. 1996',
    'b2t_kaggle.decoding.lexicon.build_trie': 'Ney et al. 1992',
    'b2t_kaggle.decoding.phoneme_lists.confusions.minimize': 'Nocedal 1980',
    'b2t_kaggle.decoding.phoneme_lists.confusions.ExpectedWordErrors': 'Prabhavalkar et al. 2018',
    'b2t_kaggle.decoding.phoneme_lists.lists.phoneme_network': 'Mangu et al. 2000',
    'b2t_kaggle.decoding.search.FusedSearch': 'Hori et al. 2025',
    'b2t_kaggle.decoding.search.Search': 'Hannun et al. 2014',
    'b2t_kaggle.decoding.search._kth_largest': 'Hoare 1961',
    'b2t_kaggle.decoding.tuning.tune_search': 'Och 2003',
    'b2t_kaggle.lm.automaton.Automaton': 'Heafield 2011',
    'b2t_kaggle.lm.backoff.BackoffModel': 'Katz 1987',
    'b2t_kaggle.lm.causal.prefix_tree': 'Miao et al. 2024',
    'b2t_kaggle.lm.causal.quantization_options': 'Dettmers et al. 2022',
    'b2t_kaggle.lm.finetune': 'Hu et al. 2021',
    'b2t_kaggle.lm.interpolate.interpolation_weights': 'Jelinek and Mercer 1980',
    'b2t_kaggle.lm.kneser_ney._discounts': 'Chen and Goodman 1998',
    'b2t_kaggle.lm.kneser_ney.kneser_ney': 'Heafield et al. 2013',
    'b2t_kaggle.lm.backoff.prune_ngram': 'Stolcke 1998',
    'b2t_kaggle.metrics.bleu': 'Papineni et al. 2002',
    'b2t_kaggle.metrics.bootstrap.bootstrap_rates': 'Bisani and Ney 2004',
    'b2t_kaggle.metrics.bootstrap.difference_interval': 'Bisani and Ney 2004',
    'b2t_kaggle.metrics.count_edits': 'Levenshtein 1966',
    'b2t_kaggle.phonemes._Speller': 'Bisani and Ney 2008',
    'b2t_kaggle.pytorch.adaptation.Adapter': 'Feghhi et al. 2025',
    'b2t_kaggle.pytorch.alignment.info_nce': 'Oord et al. 2018',
    'b2t_kaggle.pytorch.alignment.soft_dtw': 'Cuturi and Blondel 2017',
    'b2t_kaggle.pytorch.audio.llm.language_model.add_lora': 'Hu et al. 2021',
    'b2t_kaggle.pytorch.audio.llm.language_model.save_memory': 'Chen et al. 2016',
    'b2t_kaggle.pytorch.audio.llm.whisper.WhisperReader': 'Radford et al. 2022',
    'b2t_kaggle.pytorch.augment.time_mask': 'Park et al. 2019',
    'b2t_kaggle.pytorch.cr_ctc.consistency_losses': 'Yao et al. 2025',
    'b2t_kaggle.pytorch.ctc.alignment': 'Graves et al. 2006',
    'b2t_kaggle.pytorch.ctc.ctc_loss': 'Graves et al. 2006',
    'b2t_kaggle.pytorch.layers.dropout': 'Srivastava et al. 2014',
    'b2t_kaggle.pytorch.models.gru.GRUDecoder': 'Card et al. 2024',
    'b2t_kaggle.pytorch.models.gru.init_gru': 'Glorot and Bengio 2010',
    'b2t_kaggle.pytorch.models.mamba.Mamba': 'Dao and Gu 2024',
    'b2t_kaggle.pytorch.models.mamba.MambaLayer': 'Dao and Gu 2024',
    'b2t_kaggle.pytorch.models.mamba.skip_layer': 'Huang et al. 2016',
    'b2t_kaggle.pytorch.models.transformer.RelativePositions': 'Raffel et al. 2020',
    'b2t_kaggle.pytorch.models.transformer.Transformer': 'Feghhi et al. 2025',
    'b2t_kaggle.pytorch.models.transformer.attend': 'Vaswani et al. 2017',
    'b2t_kaggle.pytorch.models.triple_gru.reverse_gradient': 'Ganin et al. 2016',
    'b2t_kaggle.pytorch.models.zipformer.Zipformer': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.attention.NonlinAttention': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.attention.RelPositionMultiheadAttentionWeights': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.attention.scores_of_sources': 'Dai et al. 2019',
    'b2t_kaggle.pytorch.models.zipformer.bypass.BypassModule': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.convolution.ChunkCausalDepthwiseConv1d': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.convolution.ConvolutionModule': 'Gulati et al. 2020',
    'b2t_kaggle.pytorch.models.zipformer.encoder.Zipformer2': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.convolution.FeedforwardModule': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.layer.Zipformer2EncoderLayer': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.attention.CompactRelPositionalEncoding': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.models.zipformer.subsampling.ConvNeXt': 'Liu et al. 2022',
    'b2t_kaggle.pytorch.optimizer.adamw.DayAdamW': 'Loshchilov and Hutter 2019',
    'b2t_kaggle.pytorch.optimizer.scaled_adam.Eden': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.optimizer.scaled_adam.ScaledAdam': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.parallel.DDP': 'Li et al. 2020',
    'b2t_kaggle.pytorch.parallel.XLA': 'Xu et al. 2021',
    'b2t_kaggle.pytorch.recurrence.gru_layer': 'Cho et al. 2014',
    'b2t_kaggle.pytorch.recurrence._scan_gru_layer': 'Cho et al. 2014',
    'b2t_kaggle.pytorch.scaling.activations.SwooshL': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.scaling.activations.SwooshR': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.scaling.balancer.Balancer': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.scaling.linear.BiasNorm': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.scaling.schedule.ScheduledFloat': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.scaling.whiten.Whiten': 'Yao et al. 2024',
    'b2t_kaggle.pytorch.ssd': 'Dao & Gu 2024',
    'b2t_kaggle.pytorch.ssd.ssd': 'Dao and Gu 2024',
    'b2t_kaggle.pytorch.trainer.WeightAverage': 'Izmailov et al. 2018',
    'b2t_kaggle.rescoring.combine.minimum_bayes_risk': 'Goel and Byrne 2000',
    'b2t_kaggle.rescoring.fusion.LLMFusion': 'Gulcehre et al. 2015',
    'b2t_kaggle.rescoring.mixture.line_search': 'Och 2003',
    'b2t_kaggle.tensorflow.augment.mask_time': 'Park et al. 2019',
    'b2t_kaggle.tensorflow.ctc.ctc_loss': 'Graves et al. 2006',
    'b2t_kaggle.tensorflow.models.gru.GRUDecoder': 'Card et al. 2024',
    'b2t_kaggle.tensorflow.models.transformer.RelativePositions': 'Raffel et al. 2020',
    'b2t_kaggle.tensorflow.models.transformer.Transformer': 'Feghhi et al. 2025',
    'b2t_kaggle.tensorflow.models.transformer.attend': 'Vaswani et al. 2017',
    'b2t_kaggle.tensorflow.models.triple_gru.reverse_gradient': 'Ganin et al. 2016',
    'b2t_kaggle.tensorflow.optimizer.LossScaler': 'Micikevicius et al. 2018',
    'b2t_kaggle.tensorflow.optimizer.StackedAdamW': 'Loshchilov and Hutter 2019',
    'b2t_kaggle.tensorflow.optimizer.clip': 'Pascanu et al. 2013',
    'b2t_kaggle.tensorflow.recurrence.gru_layer': 'Cho et al. 2014',
    'b2t_kaggle.training.recipe.averaging_rate': 'Izmailov et al. 2018',
    'b2t_kaggle.training.recipe.lr_factor': 'Loshchilov and Hutter 2017',
}


def module_of(path):
    "Name of a file's module."
    return '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts).removesuffix('.__init__')


def definitions(tree, prefix=''):
    "Functions and classes at every depth: qualified name and node."
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f'{prefix}{node.name}.')
        else: yield from definitions(node, prefix)


@cache
def docstrings(path):
    "Docstrings of a module and of its definitions: qualified name, node, docstring."
    tree = ast.parse(path.read_text())
    return [(name, node, ast.get_docstring(node) or '') for name, node in [('', tree), *definitions(tree)]]


def annotations(function):
    "Types of a function's arguments and result, as they are written."
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    types = [a.annotation for a in arguments] + [function.returns]
    return ' '.join(ast.unparse(t) for t in types if t)


def comments(function, lines):
    "Comments after a function's parameters and its result."
    signature = lines[function.lineno - 1:function.body[0].lineno - 1]
    return ' '.join(line.partition('#')[2] for line in signature)


def is_public(name):
    return not any(part.startswith('_') and not part.endswith('__') for part in name.split('.'))


def test_no_docstring_begins_with_a_question():
    found = [f'{module_of(p)}.{name}: {doc.splitlines()[0]}' for p in FILES
             for name, _, doc in docstrings(p) if re.match(r'(What|How|Who|Whose|Whom|Which|Where|When|Why)\b', doc)]
    assert not found, '\n'.join(found)


def test_whether_is_answered_by_yes_or_no():
    found = [f'{module_of(p)}.{name}: {doc.splitlines()[0]}' for p in FILES for name, node, doc in docstrings(p)
             if doc.startswith('Whether ') and ast.unparse(getattr(node, 'returns', None) or node) != 'bool']
    assert not found, '\n'.join(found)


def parts_with_arrays(node, lines):
    "A function, or the fields of a class, with array annotations: end of the name, and comments."
    if isinstance(node, ast.FunctionDef) and ARRAY.search(annotations(node)): yield '', comments(node, lines)
    for field in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(field, ast.AnnAssign) and ARRAY.search(ast.unparse(field.annotation)):
            yield f'.{ast.unparse(field.target)}', lines[field.end_lineno - 1].partition('#')[2]


def test_arrays_have_shapes():
    "19 of 20 public functions and fields give a shape; some arrays have any shape."
    n, without = 0, []
    for path in FILES:
        lines = path.read_text().splitlines()
        for name, node, doc in docstrings(path):
            for part, comment in parts_with_arrays(node, lines) if is_public(name) else ():
                n += 1
                if not SHAPE.search(doc + comment): without.append(f'{module_of(path)}.{name}{part}')
    print(*without, sep='\n')
    assert len(without) <= n/20, f'{len(without)} of {n}:\n' + '\n'.join(without)


def test_methods_name_their_source():
    docs = {f'{module_of(p)}.{name}'.rstrip('.'): ' '.join(doc.split())
            for p in FILES for name, _, doc in docstrings(p)}
    assert SOURCES.keys() <= docs.keys(), SOURCES.keys() - docs.keys()
    without = []
    for name, source in SOURCES.items():
        authors, year = source.rsplit(' ', 1)
        if not re.search(rf'{re.escape(authors)},? \(?{year}\b', docs[name]): without.append(f'{name}: {source}')
    assert not without, '\n'.join(without)


def prose_breaks(text):
    "Pairs of consecutive lines in a Markdown paragraph or item."
    text = re.sub(r'```.*?```|\$\$.*?\$\$', '', text, flags=re.S)
    other = re.compile(r'    |\s*([|#<>]|\[?!\[|\[[^]]+\]: )|\s*$')
    for line, following in pairwise(text.split('\n')):
        is_item = re.match(r'\s*([-*+]|\d+\.)\s', following)
        if not other.match(line) and not other.match(following) and not is_item: yield line, following


def prose():
    "Markdown cells of all notebooks, with their files."
    for path in sorted((PACKAGE.parent/'nbs').rglob('*.ipynb')):
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        yield from ((path, ''.join(cell['source'])) for cell in cells if cell['cell_type'] == 'markdown')


def test_prose_is_not_broken_inside_a_clause():
    "A line of less than 100 columns with room for the next word, within 120, ends a clause."
    found = [f'{path.stem}: {line}' for path, text in prose() for line, following in prose_breaks(text)
             if len(line) < 100 and len(line) + 1 + len(following.split()[0]) <= 120
             and not re.search(r'[.:;!?…\\]["”’*_`)]*$|  $', line)]
    assert not found, '\n'.join(found)


def test_prose_has_at_most_120_columns():
    "Code, formulas, tables and badges may be wider."
    plain = ((path, re.sub(r'```.*?```|\$\$.*?\$\$', '', text, flags=re.S)) for path, text in prose())
    found = [f'{path.stem}: {line}' for path, text in plain for line in text.split('\n')
             if len(line) > 120 and not re.match(r'    |\s*[|<]|\[!', line)]
    assert not found, '\n'.join(found)


# Habits of this project's earlier texts, and what to write instead
HABITS = {
    r'\b(?:is|are|was|were|be) (?:told|said|asked|noted)\b(?! (?:by|to|for|in|from)\b)': 'say who tells or asks whom',
    r'\b(?:is|are) none\b|\bnone: none\b': 'say what it is, or what does not exist',
    r'(?:^|[.:;] )(?:Kept|Wanted|Left|Found|Counted|Measured|Shown|Read|Given|Asked|Meant|Written) (?:is|are)\b':
        'put the subject first',
    r'\banew\b': 're-, or again',
    r'\bstands?\b(?! for\b|-| alone\b| out\b| still\b|ard)': 'is',
    r'\bgo(?:es|ing)? on\b(?! to\b)|\bwent on\b': 'continue',
    r'(?:^|[.!?] )(?:Where|Whatever|Whoever|Whose)\b[^.?]*?,(?![^.]*\?)': 'if, when or for',
    r'(?:^|[.!?] )What\b[^.?!]*[.;:](?= |$)': 'name the thing',
    r',? too(?=[.,;:)]|$)': 'also',
    r'\bby heart\b|\bdraw(?:s|n)? (?:no )?lots\b|\bhand(?:s|ed)? in\b': 'the technical word',
    r'(?:^|[.!?;] )(?:Nobody|Nothing)\b': 'no one when people are meant, otherwise a plain negation',
    r'(?:\b(?:[Tt]hose|one|ones|[Tt]hat)(?:,)? (?:that|of|which|with|whose)\b[^.]*){2}': 'name the thing',
}
PROMPTS = {'Write what is said.'} # For language models, whose results depend on each word
PARAMETER = re.compile(r'(?:Of|As|Its|That|Likewise|From (?:the |a |an )?(?:user|caller)$|From there)\b')


def package_of(path):
    "First folder or module under `b2t_kaggle` or `nbs`: `decoding`, `phonemes`."
    parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent/'nbs').with_suffix('').parts
    return re.sub(r'^\d+_', '', parts[0]) if parts[0] != '__init__' else 'index'


def sentences(text):
    "Sentences of a text without its code, formulas and tables."
    text = re.sub(r'```.*?```|\$\$.*?\$\$|^ *\|.*?$', ' ', text, flags=re.S | re.M)
    text = re.sub(r'`[^`]*`|\[([^]]*)\]\([^)]*\)', lambda m: m[1] or 'x', text)
    for paragraph in re.split(r'\n\s*\n|\n(?=\s*(?:[-*+#>]|\d+\.)\s)', text):
        yield from re.split(r'(?<=[.!?]) (?=[A-Z`])', ' '.join(paragraph.split()).lstrip('-*+#> '))


def texts(path):
    "Docstrings, comments and messages of a module: line and text."
    source = path.read_text(encoding='utf-8')
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] > 1: yield token.start[0], token.string.lstrip('# ')


def parameter_comments(path):
    "Comments after the parameters of a module's functions: line and comment."
    source = path.read_text(encoding='utf-8')
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef): continue
        for number in range(node.lineno, node.body[0].lineno):
            comment = re.search(r'  # (.*)| # (.*)', lines[number - 1])
            if comment: yield number, comment[1] or comment[2]


def old_habits(package):
    "Places in a package's modules and notebooks that have one of the habits."
    for path in (p for p in FILES if package_of(p) == package):
        name = path.relative_to(PACKAGE)
        for line, text in texts(path):
            for sentence in sentences('' if text in PROMPTS else text):
                for habit, instead in HABITS.items():
                    if re.search(habit, sentence): yield f'{name}:{line}: {sentence} ({instead})'
        for line, comment in parameter_comments(path):
            if PARAMETER.match(comment): yield f'{name}:{line}: # {comment} (a phrase that can be read alone)'
    for path, text in prose():
        if package_of(path) != package: continue
        for sentence in sentences(text):
            for habit, instead in HABITS.items():
                if re.search(habit, sentence): yield f'{path.parent.name}/{path.stem}: {sentence} ({instead})'


PACKAGES = sorted({package_of(p) for p in FILES} | {package_of(p) for p, _ in prose()})


@pytest.mark.parametrize('package', PACKAGES)
def test_texts_are_without_old_habits(package):
    found = list(old_habits(package))
    assert not found, '\n'.join(found)


@pytest.mark.parametrize('sentence', [
    'The new one is told.', 'Blank lines are none.', 'Kept are the best.', 'It is made anew.',
    'A size that stands here.', 'The run goes on.', 'Where there is no file, it stops.', 'What is read is checked.',
    'It is so for Redis, too.', 'Learned by heart.', 'Nobody reads it.',
    'Those that are read, and those of the others.'])
def test_habits_are_recognised(sentence): assert any(re.search(habit, sentence) for habit in HABITS)
