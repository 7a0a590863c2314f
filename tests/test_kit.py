"The script behind the README's two commands reports missing requirements before it downloads anything."
import errno
import fcntl
import os
import re
import select
import shutil
import subprocess
from pathlib import Path

import no_locks
import pytest

ROOT = Path(__file__).parent.parent


def kit(*args, path=None, options=(), **env):
    "Run the command without the environment variables of these tests that name Pythons and folders."
    calm = {k: v for k, v in os.environ.items() if not k.startswith('B2T_')}
    return subprocess.run(['/bin/bash', *options, str(ROOT/'kit'), *args], capture_output=True, text=True, timeout=60,
                          env=calm | dict(PATH=path or os.environ['PATH']) | env)


def tools(tmp_path, python):
    "A PATH with the system's small tools and a fake `python3`, but without a compiler."
    tmp_path.mkdir(exist_ok=True)
    for name in 'basename dirname sha256sum cut cat sed bash mkdir ls rm flock touch nproc'.split():
        found = next((p for p in ('/usr/bin', '/bin') if (Path(p)/name).exists()), None)
        if found: (tmp_path/name).symlink_to(Path(found)/name)
    (tmp_path/'python3').write_text(f'#!/bin/bash\n{python}\n')
    (tmp_path/'python3').chmod(0o755)
    return str(tmp_path)


def test_no_python(tmp_path):
    r = kit('run', path=tools(tmp_path, 'exit 1'))
    assert r.returncode == 2 and r.stderr.startswith('kit: Python 3.11') and 'apt-get install python3' in r.stderr


def test_a_requested_python_that_cannot_be_used(tmp_path):
    "No other Python is used instead."
    for python in ('python3', 'python3.9'):
        r = kit('run', path=tools(tmp_path/python, 'exit 1'), B2T_PYTHON=python)
        assert r.returncode == 2 and r.stderr.startswith(f'kit: B2T_PYTHON={python} is not a Python 3.11')


@pytest.mark.parametrize('version, taken', [(':', '/usr/bin/python3'), ('echo "(3, 99)"; exit', 'python3')])
def test_the_distributions_python_is_preferred_to_another_of_its_version(version, taken, tmp_path):
    own = '/usr/bin/python3'
    whole = 'import ensurepip, sys, sysconfig; open(sysconfig.get_path("include") + "/Python.h"); sys.exit(%s)'
    if subprocess.run([own, '-c', whole % 'not (3, 11) <= sys.version_info < (3, 14)'], capture_output=True).returncode:
        pytest.skip('the distribution has no Python 3.11 to 3.13 with venv and headers')
    path = tools(tmp_path, f'case "$2" in *print*version*) {version};; esac\nexec {own} "$@"')
    r = kit('env', 'kenlm', path=path, options=['-x'], B2T_ENVS=str(tmp_path/'envs'))
    assert r.returncode == 2 # There is no compiler
    assert f'\n+ py={taken if taken[0] == "/" else tmp_path/taken}\n' in r.stderr


# A Python without venv and headers; the parameter says whether it is at least 3.13
BARE = 'case "$2" in *ensurepip*|*sysconfig*) exit 1;; *venv*) echo python3.11-venv;; *">= (3, 13)"*) exit {};; esac'


@pytest.mark.parametrize('args, is_old, missing', [
    (('run',), True, ''), (('env', 'llm'), True, ''), (('env', 'dev'), False, ''), (('env', 'xla'), False, ''),
    *((('env', extra), True, ' python3-dev g++ make') for extra in ('dev', 'xla', 'kenlm')),
], ids=str)
def test_no_venv_no_headers_no_compiler(args, is_old, missing, tmp_path):
    "A compiler is required only if kenlm will be compiled."
    r = kit(*args, path=tools(tmp_path, BARE.format(int(not is_old))), B2T_ENVS=str(tmp_path/'envs'))
    assert r.returncode == 2
    reason = ' (kenlm is compiled on installation)' if missing else ''
    install = f'on Debian and Ubuntu: apt-get install python3.11-venv{missing}'
    assert r.stderr == f'kit: missing: python3.11-venv{missing}{reason}; {install}\n'
    assert not (tmp_path/'envs').exists() or not list((tmp_path/'envs').glob('env-*/bin'))


def test_kenlm_on_a_python_on_which_it_does_not_compile(tmp_path):
    r = kit('env', 'kenlm', path=tools(tmp_path, BARE.format(1)), B2T_ENVS=str(tmp_path/'envs'))
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1
    assert 'does not compile on Python 3.13; B2T_PYTHON=python3.12' in r.stderr


# A Python that has everything, but whose venv fails
NO_VENV = 'case "$*" in *"-m venv"*) echo no venv today >&2; exit 1;; *print*version*) echo 9.9;; esac'


# A Python that installs nothing, and prints its folder, arguments and variables
SAYS = """case "$*" in
*"-m venv"*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python";;
*b2t_kaggle.cli*|*own.py*) printf '%s\\n' "$PWD" "$*" "$B2T_COMMAND" "$PYTHONPATH";;
esac"""


@pytest.mark.parametrize('args, expected', [
    (('b2t', 'combine-files', 'a.jsonl'), '-P -m b2t_kaggle.cli combine-files a.jsonl'),
    (('run', '--data', '../x'), '-P -m b2t_kaggle.cli run --data ../x'), (('python', 'own.py'), 'own.py'),
], ids=lambda value: value[0] if isinstance(value, tuple) else '')
@pytest.mark.parametrize('envs', ['absolute', '.pytest_cache/envs'])
def test_paths_are_relative_to_the_callers_folder(args, expected, envs, tmp_path, monkeypatch):
    "Messages name the command as it was called, and the checkout's own code is imported."
    (tmp_path/'caller').mkdir()
    monkeypatch.chdir(tmp_path/'caller')
    tools(tmp_path, SAYS)
    envs = tmp_path/'envs' if envs == 'absolute' else Path(os.path.relpath(tmp_path/'envs', ROOT))
    r = kit(*args, B2T_PYTHON=str(tmp_path/'python3'), B2T_ENVS=str(envs), PYTHONPATH='')
    assert r.stdout.splitlines() == [str(tmp_path/'caller'), expected, f'{ROOT}/kit b2t', str(ROOT)], r.stderr


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS])
def test_an_installation_on_a_file_system_without_locks(tmp_path, number):
    env = no_locks.environment(tmp_path, number)
    r = kit('run', path=tools(tmp_path/'bin', NO_VENV), B2T_ENVS=str(tmp_path/'envs'),
            **{k: env[k] for k in ('LD_PRELOAD', 'FLOCK_ERRNO')})
    assert f'kit: cannot lock {tmp_path}/envs; do not start another ./kit' in r.stderr
    assert r.stderr.endswith('no venv today\n') # It continued


@pytest.mark.parametrize('home', [None, '/proc/1'])
def test_without_a_home_the_environment_is_temporary(tmp_path, home):
    env = dict(PATH=tools(tmp_path/'bin', NO_VENV), TMPDIR=str(tmp_path)) | (dict(HOME=home) if home else {})
    def run(): return subprocess.run(['/bin/bash', ROOT/'kit', 'run'], env=env, stderr=subprocess.PIPE, text=True)
    own = tmp_path/f'b2t_kaggle-{os.getuid()}'
    assert f'kit: installing into {own}/env-' in run().stderr
    assert own.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(own)
    own.symlink_to('/etc')
    other = run()
    assert other.returncode == 2 and "is another user's; set B2T_ENVS to a folder" in other.stderr


def test_waiting_for_another_installation_is_reported(tmp_path):
    path = tools(tmp_path/'bin', NO_VENV)
    kit('run', path=path, B2T_ENVS=str(tmp_path/'envs'))
    lock, = (tmp_path/'envs').glob('*.lock')
    env = {k: v for k, v in os.environ.items() if k != 'B2T_PYTHON'} | dict(PATH=path, B2T_ENVS=str(tmp_path/'envs'))
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen(['/bin/bash', ROOT/'kit', 'run'], env=env, stderr=subprocess.PIPE, text=True)
        if not select.select([second.stderr], [], [], 30)[0]: second.kill() # Fails after half a minute without output
        assert second.stderr.readline().startswith('kit: another ./kit is installing into')
    assert second.communicate()[1].endswith('no venv today\n')


@pytest.mark.parametrize(
    'args, status, message',
    [((), 0, './kit run'), (('--help',), 0, './kit test'), (('tset',), 2, "'tset' (did you mean ./kit test?)")]
)
def test_help_and_mistakes(args, status, message):
    r = kit(*args)
    assert r.returncode == status and message in r.stdout + r.stderr


def test_extras_are_listed_and_others_refused(tmp_path):
    "The help, and the error for a misspelled extra, list every extra in settings.ini."
    expected = re.findall(r'^(\w+)_requirements', (ROOT/'settings.ini').read_text(), re.M)
    text = ' '.join(kit('--help').stdout.split())
    listed = re.search(r'Extras: ((?:\w+, )+\w+)', text)[1]
    assert sorted(listed.split(', ')) == sorted(expected)
    r = kit('env', 'lmm', B2T_ENVS=str(tmp_path))
    assert r.returncode == 2 and r.stderr == f"kit: unknown extra 'lmm'; choose one of {' '.join(expected)}\n"


def test_numbas_compiled_files_are_shared_by_checkouts_with_equal_sources(tmp_path, monkeypatch):
    "Compiled files are shared only between equal sources; those of other sources are not even kept."
    import compiled
    monkeypatch.setattr(compiled, 'COMPILED', tmp_path/'cache')

    def session(checkout, compiles=(), **sources):
        "Files found when a session of pytest starts in a checkout; afterwards the session compiles more."
        cache = tmp_path/checkout/'b2t_kaggle'/'__pycache__'
        cache.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items(): (cache.parent/f'{name}.py').write_text(source)
        monkeypatch.setattr(compiled, 'ROOT', tmp_path/checkout)
        compiled.take_compiled()
        found = sorted(p.name for p in cache.glob('*.nb?'))
        for name in compiles: (cache/name).write_text(checkout)
        compiled.keep_compiled()
        return found

    old = dict(fast='@njit', slow='pass')
    assert session('one', ['f.nbi', 'f.1.nbc'], **old) == []
    assert session('two', ['g.nbi', 'g.1.nbc'], **old) == ['f.1.nbc', 'f.nbi']
    assert session('one') == ['f.1.nbc', 'f.nbi']  # its own files
    assert session('three', **old | dict(slow='other')) == ['f.1.nbc', 'f.nbi', 'g.1.nbc', 'g.nbi']
    assert session('two', fast='@njit()') == []
    assert session('two', fast='@njit') == ['f.1.nbc', 'f.nbi', 'g.1.nbc', 'g.nbi']
    assert (tmp_path/'two'/'b2t_kaggle'/'__pycache__'/'g.nbi').read_text() == 'two'


def test_compiled_programs_of_tensorflow_are_kept(tmp_path, monkeypatch):
    "Each processor has its own folder, which is emptied if it has grown too large; a user's own flags stay."
    import compiled
    monkeypatch.setattr(compiled, 'PROGRAMS', tmp_path/'of one')
    environ = {}
    compiled.keep_programs(environ)
    assert environ == {} # A space would end the flag
    monkeypatch.setattr(compiled, 'PROGRAMS', tmp_path/'xla')
    monkeypatch.setattr(compiled, 'LARGEST', 10)

    def kept_in(cpu, **environ):
        monkeypatch.setattr(compiled, 'instructions', lambda: cpu)
        compiled.keep_programs(environ)
        return environ['TF_XLA_FLAGS']

    folder = Path(kept_in('flags : avx2').removeprefix('--tf_xla_persistent_cache_directory='))
    assert folder.is_dir() and kept_in('flags : avx2 avx512f') != kept_in('flags : avx2')
    (folder/'a.pb').write_bytes(bytes(10))
    kept_in('flags : avx2')
    assert (folder/'a.pb').exists()
    (folder/'b.pb').write_bytes(bytes(1))
    kept_in('flags : avx2')
    assert list(folder.iterdir()) == []
    assert kept_in('flags : avx2', TF_XLA_FLAGS='--own') == '--own'
