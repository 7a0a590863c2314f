"Ragged files under stress: any arrays, any chunking, killed writers, cut and foreign files."
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from b2t_kaggle.core.ragged import Ragged, RaggedError, RaggedWriter, write_ragged

DTYPES = ['float16', 'float32', 'float64', 'int8', 'uint16', 'int32', 'int64']


@st.composite
def ragged_arrays(draw):
    "Arrays of one type and item shape, some of them empty."
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 3), (41,)]))
    lengths = draw(st.lists(st.integers(0, 9), max_size=12))
    return dtype, shape, [draw(hnp.arrays(dtype, (n, *shape))) for n in lengths]


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=ragged_arrays(), chunk=st.integers(1, 2000))
def test_round_trip(tmp_path, data, chunk):
    dtype, shape, arrays = data
    schema = pa.schema(dict(i=pa.int64(), text=pa.string()))
    with RaggedWriter(tmp_path/'x', dtype, shape, schema, 'things', dict(a=[1, None]), chunk) as w:
        for i, x in enumerate(arrays): w.append(x, i=i, text=None if i % 3 else f'“{i}”')
    r = Ragged(tmp_path/'x', kind='things')
    assert (len(r), r.dtype, r.item_shape, r.metadata) == (len(arrays), dtype, shape, dict(a=[1, None]))
    assert r.lengths.tolist() == [len(x) for x in arrays]
    for i, x in enumerate(arrays):
        assert r[i].dtype == dtype and r[i].shape == x.shape and r[i].flags.aligned
        assert r[i].tobytes() == x.tobytes() == r[i - len(arrays)].tobytes()
    texts = [None if i % 3 else f'“{i}”' for i in range(len(arrays))]
    assert r.table.to_pydict() == dict(i=list(range(len(arrays))), text=texts)
    with pytest.raises(IndexError): r[len(arrays)]


def test_an_item_is_a_view_of_the_mapped_file(tmp_path):
    r = write_ragged(tmp_path/'x', [np.full((1000, 8), i, 'float32') for i in range(50)])
    with open('/proc/self/maps') as f: maps = [line.split() for line in f if str(tmp_path/'x') in line]
    start, end = (int(a, 16) for a in maps[0][0].split('-'))
    assert all(start <= r[i].ctypes.data and r[i].ctypes.data + r[i].nbytes <= end for i in range(50))
    with pytest.raises(ValueError): r[0][0] = 1


def test_any_item_is_found_in_constant_time(tmp_path):
    def cost(n):
        r = write_ragged(tmp_path/str(n), (np.zeros((2, 3), 'float32') for _ in range(n)))
        best = np.inf
        for _ in range(5):
            start = time.thread_time() # Time of other processes does not count
            for i in range(0, n, n//200): r[i]
            best = min(best, time.thread_time() - start)
        return best/len(range(0, n, n//200))
    assert cost(20_000) < 5*cost(400)


def test_it_can_be_sent_to_another_process(tmp_path):
    r = write_ragged(tmp_path/'x', [np.arange(6, dtype='int32').reshape(3, 2)], pd.DataFrame(dict(key=['a'])))
    copy = pickle.loads(pickle.dumps(r))
    assert np.array_equal(copy[0], r[0]) and copy.index.equals(r.index)


@pytest.fixture
def good(tmp_path):
    path = tmp_path/'good.arrow'
    with RaggedWriter(path, 'float32', (3,), pa.schema(dict(key=pa.string())), chunk_bytes=100) as w:
        for i in range(20): w.append(np.full((i, 3), i, 'float32'), key=str(i))
    return path


def test_a_cut_file_is_refused_wherever_it_is_cut(good, tmp_path):
    whole = good.read_bytes()
    for n in [*range(0, len(whole), 37), len(whole) - 1]:
        (tmp_path/'cut').write_bytes(whole[:n])
        with pytest.raises(RaggedError, match='cut: '): Ragged(tmp_path/'cut')


def test_damage_does_not_kill_the_process(good, tmp_path):
    "Offsets outside the file would kill it; values have no checksum."
    code = '''if True:
        import random, sys
        from pathlib import Path
        from b2t_kaggle.core.ragged import Ragged
        whole, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
        random.seed(0)
        for _ in range(600):
            b, k = bytearray(whole), random.randrange(len(whole))
            b[k] ^= 1 << random.randrange(8)
            path.write_bytes(b)
            try: r = Ragged(path); [float(x.sum()) for x in r]; r.index
            except Exception: pass'''
    assert subprocess.run([sys.executable, '-c', code, good, tmp_path/'flipped']).returncode == 0


@pytest.mark.parametrize('content', [b'', b'ARROW1\0\0', b'\x89HDF\r\n\x1a\n' + bytes(100), os.urandom(5000)])
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path/'foreign').write_bytes(content)
    with pytest.raises(RaggedError, match='foreign: not an Arrow IPC file'): Ragged(tmp_path/'foreign')


def test_errors_say_what_is_wrong(good, tmp_path):
    with pytest.raises(RaggedError, match='no such file'): Ragged(tmp_path/'nothing')
    with pytest.raises(RaggedError, match='there are no arrays'): write_ragged(tmp_path/'x', [])
    with pytest.raises(RaggedError, match=r"array 0 has the index columns \['name'\], expected \['key'\]"):
        with RaggedWriter(tmp_path/'x', 'float32', schema=pa.schema(dict(key=pa.string()))) as w:
            w.append(np.zeros(3), name='a')
    with pytest.raises(RaggedError, match='convert them first'):
        with RaggedWriter(tmp_path/'x', 'int16') as w: w.append(np.array([1], 'int64'))
    assert os.listdir(tmp_path) == ['good.arrow']


@pytest.mark.parametrize('value', [65520., -65520., 1e30, np.float64(1e300)])
def test_overflow_is_an_error_and_rounding_is_not(tmp_path, value):
    with pytest.raises(RaggedError, match='array 0 has the value .*, beyond float16'):
        with RaggedWriter(tmp_path/'x', 'float16') as w: w.append(np.array([1, value]))
    # An infinity in the input is kept
    with RaggedWriter(tmp_path/'x', 'float16') as w: w.append(np.array([65519.9, 1e-30, np.inf, np.nan]))
    assert np.array_equal(Ragged(tmp_path/'x')[0], np.array([65504, 0, np.inf, np.nan], 'float16'), equal_nan=True)


def test_a_killed_writer_leaves_the_old_file_and_its_temporary_file_is_removed(good):
    before = good.read_bytes()
    code = '''if True:
        import sys, numpy as np
        from b2t_kaggle.core.ragged import RaggedWriter
        with RaggedWriter(sys.argv[1], 'float32', chunk_bytes=1000) as w:
            for i in range(10**9):
                w.append(np.zeros(100))
                if i == 100: print('writing', flush=True)'''
    p = subprocess.Popen([sys.executable, '-c', code, good], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == 'writing\n'
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert good.read_bytes() == before and len(os.listdir(good.parent)) == 2
    write_ragged(good, [np.ones(3)])
    assert len(Ragged(good)) == 1 and os.listdir(good.parent) == ['good.arrow']


def test_two_writers_do_not_interfere(tmp_path):
    with RaggedWriter(tmp_path/'x', 'float32') as a:
        code = ('import sys, numpy as np; from b2t_kaggle.core.ragged import write_ragged; '
                'write_ragged(sys.argv[1], [np.ones(5)])')
        subprocess.run([sys.executable, '-c', code, tmp_path/'x'], check=True)
        assert len(Ragged(tmp_path/'x')[0]) == 5
        a.append(np.zeros(7))
    assert len(Ragged(tmp_path/'x')[0]) == 7 and os.listdir(tmp_path) == ['x']


def test_memory_use_is_that_of_one_chunk(tmp_path):
    code = '''if True:
        import re, sys, numpy as np
        from b2t_kaggle.core.ragged import RaggedWriter
        # of this program alone: ru_maxrss would start with the memory of the process that forked it
        peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])/1024
        x = np.ones((500, 512), 'float32')
        with RaggedWriter(sys.argv[1], 'float16', (512,), chunk_bytes=16 << 20) as w:
            for i in range(100): w.append(x)
            before = peak()
            for i in range(400): w.append(x)
            print(peak() - before)'''
    command = [sys.executable, '-c', code, tmp_path/'x']
    grown = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (tmp_path/'x').stat().st_size > 250e6 and grown < 10   # MB


def test_errors_about_float16_give_advice(tmp_path):
    with pytest.raises(RaggedError, match='beyond float16.*--set data.dtype=float32'):
        with RaggedWriter(tmp_path/'x', 'float16') as w: w.append(np.array([1., -7e4]))
    assert os.listdir(tmp_path) == []
