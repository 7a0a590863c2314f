"Train with two agents of torchrun on the loopback address: undisturbed, with one agent killed, and with mistakes."
import os
import shutil
import signal
import subprocess
from pathlib import Path

from trial import SMALL, batches, compare, folder, show, wait_for

SECOND = ['torchrun', '--node_rank=1', '--nproc_per_node=1', '-m', 'b2t_kaggle.pytorch.launch']
ADDRESS = dict(PET_NNODES='2', PET_MASTER_ADDR='127.0.0.1')


def machines(name: str, port: int, job: str | None = None) -> list[subprocess.Popen]:
    "Start the commands of the first and the second machine."
    env = os.environ | ADDRESS | dict(PET_MASTER_PORT=str(port))
    job = job or f'submissions/{name}/train/machines/job.json'
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    first = subprocess.Popen(['b2t', 'train', '--name', name, *SMALL], **pipes)
    second = subprocess.Popen([*SECOND, job], **pipes)
    return [first, second]


def outcome(name: str, processes: list[subprocess.Popen]) -> str:
    "Print how the first machine's command ended; returns its output."
    text = processes[0].communicate()[0]
    processes[1].communicate()
    print(f'{name}: exit status {processes[0].returncode} after {batches(name)} saved batches', flush=True)
    return text


def undisturbed() -> None:
    outcome('whole', machines('whole', 29510))


def one_killed() -> None:
    both = machines('killed', 29511)
    wait_for(lambda: batches('killed') >= 15, 'batch 15')
    both[1].send_signal(signal.SIGKILL)
    show(outcome('killed', both), 'rror')
    print('the same two commands again:')
    outcome('killed', machines('killed', 29512))
    compare('whole', 'killed')


def no_shared_disk() -> None:
    env = os.environ | dict(PET_MASTER_ADDR='127.0.0.1', PET_MASTER_PORT='29514')
    second = subprocess.run(['torchrun', '--nproc_per_node=1', '-m', 'b2t_kaggle.pytorch.launch',
                             '/shared/brain/submissions/big/train/machines/job.json'],
                            capture_output=True, text=True, env=env)
    print(f'without the shared disk: exit status {second.returncode}')
    show(second.stderr, 'does not exist')


def other_data() -> None:
    "The second machine's job names a store with other trials, as if its copy of the work folder were outdated."
    new, = Path('data').glob('packed-*')
    pack = ['b2t', 'pack', *SMALL, '--name', 'old', '--set', 'simulate.seed=5']
    subprocess.run(pack, capture_output=True, check=True)
    old, = set(Path('data').glob('packed-*')) - {new}
    both = machines('other', 29515, 'copy/job.json')
    job = Path('submissions/other/train/machines/job.json')
    wait_for(job.exists, 'job')
    Path('copy').mkdir()
    Path('copy/job.json').write_text(job.read_text().replace(new.name, old.name))
    show(outcome('other', both), 'rror')


if __name__ == '__main__':
    path = folder()
    subprocess.run(['b2t', 'pack', '--name', 'data', *SMALL], capture_output=True, check=True)
    undisturbed()
    one_killed()
    no_shared_disk()
    other_data()
    shutil.rmtree(path)
