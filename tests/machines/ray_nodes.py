"Run the guide's `on_ray.py` on a Ray cluster of two local nodes, one of which is removed during the sweep."
import os
import shutil
import subprocess
import sys
from pathlib import Path

import optuna
from ray.cluster_utils import Cluster
from trial import SMALL, batches, compare, folder, scripts, show, wait_for

N_POINTS = 4


def points() -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend('search.journal'))
    return optuna.load_study(study_name='search', storage=storage).trials


if __name__ == '__main__':
    path = folder()
    subprocess.run(['b2t', 'pack', '--name', 'data', *SMALL], capture_output=True, check=True)
    os.environ['RAY_worker_niceness'] = '0' # Under load, the points would starve with Ray's default of 15
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    second = cluster.add_node(num_cpus=1)
    Path('on_ray.py').write_text(scripts()['on_ray.py'])
    command = [sys.executable, 'on_ray.py', 'b2t', 'sweep', '--name', 'search', *SMALL, '--study', 'search.journal',
               '--trials', str(N_POINTS), '--set', 'lr_max=1e-4:1e-2:log']
    with open('output', 'w') as out:
        sweep = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT,
                                 env=os.environ | dict(RAY_ADDRESS=cluster.address, RAY_DEDUP_LOGS='0'))
    try:
        wait_for(lambda: min(batches('search-000'), batches('search-001')) >= 6, 'batch 6 of two points')
        begun = {name: batches(name) for name in ('search-000', 'search-001')}
        cluster.remove_node(second, allow_graceful=False)
        print(f'a node is removed; batches that are saved: {begun}', flush=True)
        print(f'on_ray.py: exit status {sweep.wait(1800)}', flush=True)
    finally:
        sweep.kill()
        cluster.shutdown()
    show(Path('output').read_text(), 'search-00')
    for t in points(): print(f'point {t.number}: {t.state.name}, PER {t.value:.4f}, {t.params}')
    counts = [t.state.name for t in points()].count('COMPLETE'), len(points())
    print(f'{counts[0]} of {counts[1]} points are complete, expected {N_POINTS} of {N_POINTS}')
    for name in begun:
        rate = points()[int(name[-3:])].params['train.lr_max']
        subprocess.run(['b2t', 'train', '--name', f'alone-{name}', *SMALL, '--set', f'lr_max={rate!r}'], check=True,
                       capture_output=True)
        compare(f'alone-{name}', name)
    shutil.rmtree(path)
