"""Damaged and hostile files of every kind give the same result as undamaged files, or one line that names the file.

`pytest tests/faults --faults 1000` tries a thousand random cases of each kind instead of a few.
"""
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import READERS, in_a_process, report, start, try_kind, try_reader  # noqa: E402
from cases import HOSTILE, KINDS, SECRET, kinds_in, make_kinds  # noqa: E402


@pytest.fixture(scope='module')
def kinds(tmp_path_factory):
    "The folder with a file of each kind."
    start()
    folder = tmp_path_factory.mktemp('kinds')
    make_kinds(folder)
    return folder


@pytest.fixture(scope='module')
def secret(tmp_path_factory):
    "Another user's file, as bytes and as HDF5."
    path = tmp_path_factory.mktemp('elsewhere')/'secret'
    path.write_text(SECRET)
    with h5py.File(path.with_suffix('.h5'), 'w') as f:
        f['codes'] = np.array([ord(c) for c in SECRET.ljust(500, '\0')], 'i4')
        f.attrs['sentence_label'] = SECRET
    return path


@pytest.mark.parametrize('name', KINDS)
def test_hostile_and_damaged_files(kinds, secret, tmp_path, name, request):
    n = 0 if name.startswith('KenLM') else request.config.getoption('--faults') # Only the header is verified
    found = in_a_process(try_kind, tmp_path/'case', kinds, name, n, secret)
    assert not report(found), report(found)
    assert len(found) == 1 + n + len(HOSTILE[name])


@pytest.mark.parametrize('expected', READERS)
def test_the_campaign_detects_broken_readers(kinds, tmp_path, secret, expected):
    "Readers that fail in each of the ways are all detected."
    seconds = {'seconds': 2} if expected == 'hangs' else {}
    found = in_a_process(try_reader, tmp_path/'case', kinds_in(kinds)['config'].path, expected, secret, **seconds)
    assert expected in report(found), found
    if expected == 'damage was not noticed': assert report(found).startswith('0: ')
