"""A local server with the parts of Kaggle that a cycle needs: it accepts the client's requests, runs notebooks at once,
and can make any request fail."""
import json
import re
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock, Thread

CSV = 'id,text\n0,Hello there\n1,How are you\n'
BATCHES = 120_000
DROP, LATE, HALF = 'no answer', 'an answer that is lost', 'half of an answer'


def output_of(steps: int) -> dict[str, str]:
    "Files that `train.ipynb` leaves."
    stamp = dict(key='k', metrics=dict(steps=steps), finished=steps == BATCHES)
    return {'run/config.yaml': 'data:\n  dataset_dir: /kaggle/input\n', 'run/stages/train.json': json.dumps(stamp),
            'run/train/best.pt': 'weights '*1000}


SUBMISSION = {'submission.csv': CSV, 'run/submission.csv': CSV,
              'run/stages/submit.json': json.dumps(dict(key='k', metrics=dict(rows=2)))}


class Kaggle:
    "Kaggle's state. A notebook is a list of its versions; the last one runs."
    def __init__(self):
        self.lock = RLock()
        self.forget()

    def forget(self) -> None:
        "Reset the state."
        self.has_joined = True
        self.token_works = True
        self.hours_used = {'gpu': 0., 'tpu': 0.}
        self.asked: list[tuple[str, dict]] = []
        self.blobs: dict[str, tuple[str, bytes]] = {}
        self.datasets: dict[str, list[set[str]]] = {} # File names of each version
        self.models: set[str] = set() # OWNER/MODEL
        self.kernels: dict[str, list[dict]] = {}
        self.submissions: list[dict] = []
        self.refusal = '' # Kaggle's error about a CSV that it has accepted
        self.comment = '' # Kaggle's comment on a notebook that failed
        self.log = 'train:  50%\rtrain: 100%\nover\n'
        self.dataset_status = 'READY'
        self.steps_of_a_part = 60_000
        self.files: dict[str, dict[str, str]] = {} # Wrong output files by notebook
        self.fate: dict[str, list[str]] = {} # Successive states by notebook; the last one stays
        # Faults by name and count of a request: DROP, LATE, HALF, status and message, or an answer
        self.fault: Callable[[str, int], object] = lambda name, n: None
        self.counts: Counter[str] = Counter()

    def names(self) -> list[str]: return [name for name, _ in self.asked]

    def IntrospectToken(self, body): return dict(active=self.token_works, username='ada', userId=1)
    def GetCompetition(self, body): return dict(id=1, userHasEntered=self.has_joined)

    def GetAcceleratorQuotaStatistics(self, body):
        def quota(used, allowed):
            return dict(timeUsed=f'{int(3600*used)}s', timeReserved='0s', totalTimeAllowed=f'{3600*allowed}s')
        return dict(quotaRefreshTime='2026-11-28T00:00:00Z', gpuQuota=quota(self.hours_used['gpu'], 30),
                    tpuQuota=quota(self.hours_used['tpu'], 20))

    def GetDatasetStatus(self, body):
        name = f'{body["ownerSlug"]}/{body["datasetSlug"]}'
        return dict(status=self.dataset_status) if name in self.datasets else (404, 'Not Found')

    def ListDatasetFiles(self, body):
        name = f'{body["ownerSlug"]}/{body["datasetSlug"]}'
        if name not in self.datasets: return 404, 'Not Found'
        files = sorted(self.datasets[name][-1])
        first = int(body.get('pageToken') or 0)
        more = str(first + 2) if first + 2 < len(files) else ''
        return dict(datasetFiles=[dict(name=name) for name in files[first:first + 2]], nextPageToken=more)

    def GetModel(self, body):
        name = f'{body["ownerSlug"]}/{body["modelSlug"]}'
        return dict(id=1) if name in self.models else (404, 'Not Found')

    def StartBlobUpload(self, body):
        token = f'blob-{len(self.blobs)}'
        self.blobs[token] = (body.get('name') or body.get('fileName'), b'')
        return dict(token=token, createUrl=f'http://localhost/upload/{token}')

    StartSubmissionUpload = StartBlobUpload

    def _stored(self, files):
        return {name for name, content in (self.blobs[file['token']] for file in files or []) if content}

    def CreateDataset(self, body):
        name = f'{body["ownerSlug"]}/{body["slug"]}'
        if name in self.datasets: return dict(status='error', error='The title is already in use by a dataset.')
        self.datasets[name] = [self._stored(body.get('files'))]
        return dict(status='ok', url='http://localhost/datasets')

    def CreateDatasetVersion(self, body):
        self.datasets[f'{body["ownerSlug"]}/{body["datasetSlug"]}'].append(self._stored(body['body'].get('files')))
        return dict(status='ok', url='http://localhost/datasets')

    def SaveKernel(self, body):
        name = body['slug']
        datasets, kernels = body.get('datasetDataSources', []), body.get('kernelDataSources', [])
        lost = dict(invalidDatasetSources=[i for i in datasets if i not in self.datasets],
                    invalidModelSources=[i for i in body.get('modelDataSources', [])
                                         if '/'.join(i.split('/')[:2]) not in self.models],
                    invalidKernelSources=[i for i in kernels if self.state(i) != 'COMPLETE'],
                    invalidCompetitionSources=[] if self.has_joined else body.get('competitionDataSources', []))
        before = kernels[0] if kernels else None
        steps = self.kernels[before][-1]['steps'] if before in self.kernels else 0
        if '-train-' in name: steps = min(steps + self.steps_of_a_part, BATCHES)
        states = iter(self.fate.get(name, [*['QUEUED']*3, *['RUNNING']*2, 'COMPLETE']))
        version = dict(body=body, steps=steps, states=states, state='QUEUED',
                       files=self.files.get(name) or (SUBMISSION if 'submit' in name else output_of(steps)),
                       log=f'continues after batch {steps - self.steps_of_a_part:,}\n{self.log}')
        self.kernels.setdefault(name, []).append(version)
        return dict(url=f'http://localhost/code/{name}', versionNumber=len(self.kernels[name]), **lost)

    def state(self, name): return self.kernels[name][-1]['state'] if name in self.kernels else None

    def GetKernelSessionStatus(self, body):
        name = f'{body["userName"]}/{body["kernelSlug"]}'
        if name not in self.kernels: return 403, "Permission 'kernels.get' was denied"
        version = self.kernels[name][-1]
        version['state'] = next(version['states'], version['state'])
        return dict(status=version['state'], failureMessage=self.comment if version['state'] == 'ERROR' else '')

    def GetKernel(self, body):
        name = f'{body["userName"]}/{body["kernelSlug"]}'
        return dict(metadata=dict(currentVersionNumber=len(self.kernels[name])))

    def ListKernelSessionOutput(self, body):
        name = f'{body["userName"]}/{body["kernelSlug"]}'
        files = sorted(self.kernels[name][-1]['files'])
        first = int(body.get('pageToken') or 0)
        more = str(first + 2) if first + 2 < len(files) else ''
        return dict(files=[dict(fileName=f, url=f'http://localhost/files/{name}/{f}') for f in files[first:first + 2]],
                    nextPageToken=more)

    def ListSubmissions(self, body): return dict(submissions=self.submissions[::-1])

    def CreateSubmission(self, body):
        name, content = self.blobs[body['blobFileTokens']]
        self.submissions.append(dict(ref=len(self.submissions), description=body['submissionDescription'],
                                     status='COMPLETE', publicScore='0.0612', content=content.decode(), fileName=name))
        if self.refusal: self.submissions[-1] |= dict(status='ERROR', publicScore='', errorDescription=self.refusal)
        return dict(message='Successfully submitted', ref=1)


class Handler(BaseHTTPRequestHandler):
    "HTTP interface of `Kaggle`; the client reaches it through `http_proxy`, with absolute addresses."
    def _send(self, status, body, kind='application/json', **headers):
        self.send_response(status)
        for name, value in {'Content-Type': kind, 'Content-Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        self.wfile.write(body[:len(body)//2] if self.fault == HALF else body)

    def _begin(self, name, body):
        "Whether a request continues after its simulated fault."
        kaggle = self.server.kaggle
        kaggle.counts[name] += 1
        kaggle.asked.append((name, body))
        self.fault = kaggle.fault(name, kaggle.counts[name])
        if isinstance(self.fault, dict): self._send(200, json.dumps(self.fault).encode())
        if isinstance(self.fault, tuple):
            status, message = self.fault
            text = message if isinstance(message, bytes) else json.dumps(dict(code=status, message=message)).encode()
            self._send(status, text, 'text/html' if isinstance(message, bytes) else 'application/json')
        return self.fault in (None, LATE, HALF)

    def _answer(self, respond, name, body):
        with self.server.kaggle.lock:
            self.close_connection = True
            if not self._begin(name, body): return
            answer = respond()
            if self.fault != LATE: self._send(*answer)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get('Content-Length') or 0)) or '{}')
        name = self.path.rpartition('/')[2]
        def respond():
            answer = getattr(self.server.kaggle, name)(body)
            if isinstance(answer, tuple): answer = (answer[0], dict(code=answer[0], message=answer[1]))
            else: answer = (200, answer)
            return answer[0], json.dumps(answer[1]).encode()
        self._answer(respond, name, body)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        token = self.path.rpartition('/')[2]
        blobs = self.server.kaggle.blobs
        def respond():
            if (self.headers.get('Content-Range') or '').startswith('bytes */'): # Asks how much has arrived
                return (200, b'') if blobs[token][1] else (308, b'')
            blobs[token] = (blobs[token][0], content)
            return 200, b'{}'
        self._answer(respond, 'upload', {})

    def do_GET(self):
        kaggle = self.server.kaggle
        path = re.sub('^http://[^/]+', '', self.path)
        if path.startswith('/api/v1/kernels/logs/stream/'):
            name = path.removeprefix('/api/v1/kernels/logs/stream/')
            return self._answer(lambda: self._log(kaggle.kernels[name][-1]), 'log', {})
        owner, slug, file = path.removeprefix('/files/').split('/', 2)
        content = kaggle.kernels[f'{owner}/{slug}'][-1]['files'][file].encode()
        self._answer(lambda: (200, content, 'application/octet-stream'), 'file', dict(name=file))

    def _log(self, version):
        pieces = [version['log'][i:i + 7] for i in range(0, len(version['log']), 7)]
        if version['state'] != 'RUNNING': return 200, json.dumps([dict(data=piece) for piece in pieces]).encode()
        lines = [json.dumps(dict(data=piece)) for piece in pieces] + ['END_OF_LOG']
        return 200, ''.join(f'data: {line}\n\n' for line in lines).encode(), 'text/event-stream'

    def log_message(self, *args): pass


def serve(kaggle: Kaggle) -> ThreadingHTTPServer:
    "A server for this state, which runs until `shutdown`."
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    server.kaggle = kaggle
    Thread(target=server.serve_forever, daemon=True).start()
    return server
