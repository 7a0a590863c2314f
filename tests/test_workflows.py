"GitHub's workflows call existing scripts, and the badges of the README agree with the files."
import os
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT/'.github'/'workflows').glob('*.yml'))
FORMS = sorted((ROOT/'.github'/'ISSUE_TEMPLATE').glob('[!c]*.yml'))


def read(path):
    "A workflow; YAML 1.1 reads its key `on` as a boolean."
    values = yaml.safe_load(path.read_text())
    return values | dict(on=values.pop(True))


def steps(path): return [step for job in read(path)['jobs'].values() for step in job['steps']]


def settings():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


def test_there_are_workflows_and_forms():
    assert {'docs', 'release', 'tests'} <= {p.stem for p in WORKFLOWS}
    assert [p.stem for p in FORMS] == ['bug', 'proposal']


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_calls_existing_scripts(path):
    workflow = read(path)
    assert workflow['on'] and workflow['permissions'] == dict(contents='read')
    commands = [step['run'] for step in steps(path) if 'run' in step]
    scripts = [word for command in commands for word in re.findall(r'(?:^|[\s(])(\.ci/\w+|\./kit)', command)]
    assert scripts, 'it does something that nobody can do without GitHub'
    for script in scripts:
        assert os.access(ROOT/script, os.X_OK), script
        assert subprocess.run(['bash', '-n', ROOT/script]).returncode == 0
    for job in workflow['jobs'].values():
        assert set(filter(None, [job.get('needs')])) <= set(workflow['jobs'])
    for step in steps(path):
        assert ('run' in step) != ('uses' in step), step
        outside = set(re.findall(r'\$\{\{\s*(\w+)', step.get('run', ''))) - {'matrix'}
        assert not outside, 'what comes from outside may bring commands of a stranger along'
        if 'uses' in step: assert re.fullmatch(r'(actions|pypa)/[\w-]+@[\w./]+', step['uses'])


def test_every_script_of_ci_is_called():
    called = ' '.join(step.get('run', '') for path in WORKFLOWS for step in steps(path))
    assert [p.name for p in (ROOT/'.ci').iterdir() if f'.ci/{p.name}' not in called] == []


def test_the_tests_run_on_every_supported_python():
    matrix = read(ROOT/'.github/workflows/tests.yml')['jobs']['tests']['strategy']['matrix']['python']
    classifiers = re.search(r"for v in \((.*?)\)\)", (ROOT/'setup.py').read_text()).group(1)
    assert matrix == re.findall(r'[\d.]+', classifiers) and matrix[0] == settings()['min_python']


def test_publishing_needs_no_password():
    "Only the job that publishes may ask for an identity, and it has no secret."
    text = (ROOT/'.github/workflows/release.yml').read_text()
    jobs = read(ROOT/'.github/workflows/release.yml')['jobs']
    assert 'secrets.' not in text and 'password:' not in text
    assert [name for name, job in jobs.items() if 'id-token' in job.get('permissions', {})] == ['publish']
    assert jobs['publish']['environment'] == 'pypi' and jobs['publish']['needs'] == 'build'


@pytest.mark.parametrize('path', FORMS, ids=lambda p: p.stem)
def test_a_form_asks_something(path):
    form = yaml.safe_load(path.read_text())
    assert form['name'] and form['description'] and any(f['validations']['required'] for f in form['body'][:1])
    assert len({f['id'] for f in form['body']}) == len(form['body'])


def test_a_release_wants_the_tag_of_its_version():
    r = subprocess.run([ROOT/'.ci/release', 'v9.9.9'], capture_output=True, text=True, timeout=20)
    assert r.returncode == 1 and r.stderr == (f'release: found tag v9.9.9, expected v{settings()["version"]}, the '
                                              'version in settings.ini\n')
    if '(unreleased)' not in (ROOT/'CHANGELOG.md').read_text(): return
    r = subprocess.run([ROOT/'.ci/release', f'v{settings()["version"]}'], capture_output=True, text=True, timeout=20)
    assert r.returncode == 1 and 'CHANGELOG.md has no date' in r.stderr


def test_badges_agree_with_the_files():
    readme = (ROOT/'README.md').read_text()
    url = settings()['git_url'].replace('%(user)s', settings()['user']).replace('%(repo)s', settings()['repo'])
    shown = re.findall(r'\[!\[.*?\]\((.*?)\)\]\((.*?)\)', readme)
    assert len(shown) == 5
    for image, target in shown:
        if (m := re.fullmatch(rf'{url}/actions/workflows/(\w+\.yml)/badge\.svg', image)):
            assert (ROOT/'.github/workflows'/m.group(1)).exists() and target == f'{url}/actions/workflows/{m.group(1)}'
        elif 'colab' in image:
            m = re.fullmatch(r'https://colab\.research\.google\.com/github/([\w-]+/\w+)/blob/main/(.*)', target)
            assert url.endswith(m.group(1)) and (ROOT/m.group(2)).exists()
        elif 'python' in image: # shields.io doubles dashes
            matrix = read(ROOT/'.github/workflows/tests.yml')['jobs']['tests']['strategy']['matrix']['python']
            assert re.search(r'python-(.*?)--(.*?)-\w+$', image).groups() == (matrix[0], matrix[-1])
        else:
            assert 'license-Apache%202.0-' in image and target == 'LICENSE'
            assert 'Apache License' in (ROOT/'LICENSE').read_text()[:200]
