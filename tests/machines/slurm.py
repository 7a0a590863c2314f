"""Run the guide's Slurm scripts on a simulated cluster of two machines: `slurm.py seeds`, `sweep`, `training`, or all.
Tasks are requeued, killed, and compared with runs without Slurm. Needs root."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from trial import SMALL, batches, compare, folder, scripts, show, wait_for

CONF = """ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
AuthInfo=socket={path}/munge/socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16818
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/%n.pid
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool-%n
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
NodeName=machine1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17011
NodeName=machine2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17012
PartitionName=all Nodes=machine1,machine2 Default=YES MaxTime=INFINITE State=UP
"""


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode: raise SystemExit(f'{command}: {done.stderr}')
    return done.stdout.strip()


def start_cluster(path: Path) -> list[Path]:
    "Start munge and Slurm with their files in a separate folder; returns their PID files."
    for name in ('munge', 'state', 'spool-machine1', 'spool-machine2'): (path/name).mkdir(parents=True)
    key = path/'munge'/'key'
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {option: f'--{option}={path}/munge/{option.partition("-")[0]}'
             for option in ('socket', 'key-file', 'log-file', 'pid-file', 'seed-file')}
    call('munged', '--force', *files.values())
    (path/'slurm.conf').write_text(CONF.format(host=os.uname().nodename, path=path))
    os.environ['SLURM_CONF'] = str(path/'slurm.conf')
    call('slurmctld')
    for machine in ('machine1', 'machine2'): call('slurmd', '-N', machine)
    wait_for(lambda: 'idle' in call('sinfo', '-h', '-o', '%T'), 'machine', 60)
    print(call('sinfo'), flush=True)
    return [path/f'{name}.pid' for name in ('machine1', 'machine2', 'slurmctld')] + [path/'munge'/'pid']


def written(name: str, changes: dict[str, str]) -> str:
    "Write a script of the guide with small values instead of its own."
    text = scripts()[name]
    small = {'/shared/brain': os.getcwd(), '--data sessions --preset transformer': ' '.join(SMALL), ' --gpus=1': '',
             '--data sessions --preset mamba': ' '.join(SMALL), ' --gpus-per-node=8': '', 'sleep 180': 'sleep 1'}
    for old, new in (small | changes).items(): text = text.replace(old, new)
    Path(name).write_text(text)
    return name


def job_state(job: str) -> str: return call('scontrol', 'show', 'job', job).partition('JobState=')[2].split()[0]


def wait_for_end(*jobs: str) -> None:
    "Wait until jobs are over; requeued jobs start immediately instead of two minutes later."
    def is_over():
        states = [job_state(job) for job in jobs]
        for job, state in zip(jobs, states):
            now = ['scontrol', 'update', f'JobId={job}', 'StartTime=now']
            if state == 'PENDING': subprocess.run(now, capture_output=True)
        time.sleep(2)
        return not {'PENDING', 'RUNNING', 'COMPLETING', 'CONFIGURING', 'REQUEUED'} & set(states)
    wait_for(is_over, 'end of the jobs', 1800)
    for job in jobs: print(f'job {job}: {job_state(job)}', flush=True)


def processes(*words: str) -> list[psutil.Process]:
    "Processes whose command line has all of these words, without the shells that started them."
    commands = {p: p.info['cmdline'] or [''] for p in psutil.process_iter(['cmdline'])}
    return [p for p, line in commands.items() if Path(line[0]).name not in ('bash', 'srun')
            and all(any(word in part for part in line) for word in words)]


def seeds() -> None:
    for i in '12':
        subprocess.run(['b2t', 'train', '--name', f'alone{i}', *SMALL, '--set', f'train.seed={i}'], check=True,
                       capture_output=True)
    array = call('sbatch', '--parsable', written('seeds.sh', {'--array=1-10': '--array=1-2'}))
    vote = call('sbatch', '--parsable', f'--dependency=afterok:{array}', written('vote.sh', {}))
    wait_for(lambda: batches('seed1') >= 6, 'batch 6 of seed1')
    call('scontrol', 'requeue', f'{array}_1')
    print(f'seed1: scontrol requeue after {batches("seed1")} batches', flush=True)
    wait_for(lambda: batches('seed2') >= 6, 'batch 6 of seed2')
    for p in processes('b2t_kaggle.cli', 'seed2'): p.kill()
    print(f'seed2: SIGKILL after {batches("seed2")} batches', flush=True)
    print(call('squeue', '-o', '%.6i %.7j %.9T %R'), flush=True)
    wait_for_end(f'{array}_1', f'{array}_2', vote)
    for i in '12': compare(f'alone{i}', f'seed{i}')
    for file in sorted(Path().glob('slurm-*.out')): show(file.read_text(), '')
    print(f'vote.csv has {len(Path("vote.csv").read_text().splitlines()) - 1} sentences')


def sweep() -> None:
    import optuna
    script = written('sweep.sh', {'--array=1-8': '--array=1-2', '--trials 40': '--trials 3',
                                  ' --set weight_decay=1e-4:1e-1:log': ''})
    job = call('sbatch', '--parsable', script)
    wait_for(lambda: batches('search-000') >= 6, 'batch 6 of search-000')
    lock = Path('submissions/search-000/sweep.lock').read_text()
    os.kill(int(lock.partition('"owner": "')[2].split('-')[1]), signal.SIGKILL)
    print(f'search-000: SIGKILL after {batches("search-000")} batches', flush=True)
    wait_for_end(f'{job}_1', f'{job}_2')
    job = call('sbatch', '--parsable', script)
    wait_for_end(f'{job}_1', f'{job}_2')
    for file in sorted(Path().glob('slurm-*.out')): show(file.read_text(), 'search-00')
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend('search.journal'))
    trials = optuna.load_study(study_name='search', storage=storage).trials
    print(f'{len(trials)} points: {", ".join(t.state.name for t in trials)}; '
          f'search.journal has {Path("search.journal").stat().st_size} bytes', flush=True)
    rate = trials[0].params['train.lr_max']
    subprocess.run(['b2t', 'train', '--name', 'alone', *SMALL, '--set', f'lr_max={rate!r}'], check=True,
                   capture_output=True)
    compare('alone', 'search-000')


def training() -> None:
    two = [word.replace('train.processes=1', 'train.processes=2') for word in SMALL]
    subprocess.run(['b2t', 'train', '--name', 'together', *two], check=True, capture_output=True)
    address = {'$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)': '127.0.0.1'} # machine1 has no address
    script = written('two_machines.sh', address)
    job = call('sbatch', '--parsable', script)
    wait_for(lambda: batches('big') >= 6, 'batch 6 of big')
    print(call('squeue', '-o', '%.6i %.7j %.9T %R'), flush=True)
    for p in processes('torchrun', '--node_rank=1'): p.send_signal(signal.SIGKILL)
    print(f'big: SIGKILL of the second machine\'s torchrun after {batches("big")} batches', flush=True)
    wait_for_end(job)
    show(Path(f'slurm-{job}.out').read_text(), 'rror')
    wait_for_end(call('sbatch', '--parsable', script))
    compare('together', 'big')


if __name__ == '__main__':
    path = folder()
    cluster = Path(f'{path}-slurm')
    pids = start_cluster(cluster)
    try:
        subprocess.run(['b2t', 'pack', '--name', 'data', *SMALL], capture_output=True, check=True)
        for part in sys.argv[1:] or ('seeds', 'sweep', 'training'): globals()[part]()
    finally:
        for pid in pids: os.kill(int(pid.read_text()), signal.SIGTERM)
    shutil.rmtree(path)
    shutil.rmtree(cluster)
