"""A headless Chromium, controlled through its driver (W3C WebDriver), for tests of pages.

Debian packages them as chromium and chromium-driver.
"""
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
DRIVER = shutil.which('chromedriver')
QUIET = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync',
         '--disable-component-update', '--disable-background-networking', '--hide-scrollbars',
         '--allow-file-access-from-files', '--disable-dev-shm-usage'] # A container's /dev/shm is too small
WIDTHS = dict(phone=390, desktop=1280)
WAIT = 60   # Timeout of one command, in seconds
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({})) # Bypasses proxies


class Browser:
    "A session of the driver."
    def __init__(self, port: int, folder: str):
        self.url = f'http://127.0.0.1:{port}'
        options = {'binary': CHROMIUM, 'args': [*QUIET, f'--user-data-dir={folder}']}
        wanted = {'browserName': 'chrome', 'goog:chromeOptions': options, 'goog:loggingPrefs': {'browser': 'ALL'}}
        self.url += '/session/' + self.ask('/session', dict(capabilities=dict(alwaysMatch=wanted)))['sessionId']

    def ask(self, path: str, body: dict | None = None, method: str = 'POST'):
        data = json.dumps(body or {}).encode() if method == 'POST' else None
        request = urllib.request.Request(self.url + path, data, {'Content-Type': 'application/json'}, method=method)
        with _DIRECT.open(request, timeout=WAIT) as answer: return json.load(answer)['value']

    def command(self, name: str, **params): return self.ask('/goog/cdp/execute', dict(cmd=name, params=params))

    def show(self, page: Path, width: int, dark: bool = False):
        "Open a page in a window of this width."
        self.command('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1,
                     mobile=width < 600)
        scheme = dict(name='prefers-color-scheme', value='dark' if dark else 'light')
        self.command('Emulation.setEmulatedMedia', features=[scheme])
        self.ask('/url', dict(url=page.resolve().as_uri()))

    def run(self, script: str):
        "Run a script and return its result."
        return self.ask('/execute/sync', dict(script=script, args=[]))

    def messages(self) -> list[str]:
        "Console messages since the last call."
        return [entry['message'] for entry in self.ask('/se/log', dict(type='browser'))]

    def picture(self, path: Path, whole: bool = True):
        shot = self.command('Page.captureScreenshot', format='png', captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot['data']))


# Elements wider than the window that no surrounding element lets a reader scroll sideways
TOO_WIDE = '''
const wide = []
for (const e of document.querySelectorAll('body *')) {
  const box = e.getBoundingClientRect()
  if (!box.width || box.right <= document.documentElement.clientWidth + 1) continue
  let p = e
  while (p && !['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) p = p.parentElement
  if (!p || p === document.body) wide.push(`${e.tagName} ${e.getAttribute('class')}: ${e.textContent.slice(0, 40)}`)
}
return wide.slice(0, 3)
'''
# Tables that a reader would have to scroll sideways
SCROLLED = '''
return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent.trim().slice(0, 60))
'''
# The lowest contrast (WCAG) between text and its background, and where it occurs
CONTRAST = '''
const parse = c => (c.match(/[\\d.]+/g) || []).map(Number)
const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  return 0.2126 * r + 0.7152 * g + 0.0722 * b }
const behind = e => { while (e) { const c = parse(getComputedStyle(e).backgroundColor)
  if (c.length === 3 || c[3] > 0.9) return c.slice(0, 3); e = e.parentElement } return [255, 255, 255] }
let least = [21, '']
for (const e of document.querySelectorAll('main *, header *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('svg')) continue
  if (!e.getBoundingClientRect().width) continue
  const [a, b] = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(behind(e))]
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
  if (ratio < least[0]) least = [ratio, e.outerHTML.slice(0, 100)]
}
return least
'''


# Ends the driver and its browser when its standard input closes, which happens when the test is over or was killed
_KEEPER = '''
import os, shutil, signal, subprocess, sys
folder, *command = sys.argv[1:]
with open(folder + '/driver.log', 'wb') as log:
    driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
sys.stdin.read()
try: os.killpg(driver.pid, signal.SIGKILL)
except ProcessLookupError: pass
driver.wait()
shutil.rmtree(folder, ignore_errors=True)
'''


@contextmanager
def browser():
    "Start a browser that ends after the block, even if this process is killed."
    folder = Path(tempfile.mkdtemp(prefix='b2t-browser-'))
    command = [sys.executable, '-c', _KEEPER, folder, DRIVER, '--port=0']
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        one = Browser(_port(folder/'driver.log'), f'{folder}/profile')
        try: yield one
        finally:
            with suppress(OSError): one.ask('', method='DELETE')
    finally:
        keeper.stdin.close()
        keeper.wait(timeout=WAIT)


def _port(log: Path) -> int:
    "The port that the driver chose."
    for _ in range(10*WAIT):
        words = (log.read_text() if log.exists() else '').rstrip().rstrip('.').rsplit(' ', 1)
        if 'started successfully on port' in words[0]: return int(words[1])
        time.sleep(0.1)
    raise TimeoutError(f'the driver of Chromium did not start: {log.read_text()}')
