"Builds the documentation site: `./kit docs`."
import argparse
import sys
import time
from pathlib import Path

from .build import build
from .check import problems

if __name__ == '__main__':
    parser = argparse.ArgumentParser(prog='./kit docs', description='Build the documentation site.')
    parser.add_argument('--output', default='_docs', help='folder of the site')
    parser.add_argument('--jobs', type=int, help='processes that execute notebooks')
    parser.add_argument('--plain', action='store_true', help='without the outputs of examples, in seconds')
    args = parser.parse_args()
    started = time.time()
    n = build(args.output, args.jobs, execute=not args.plain)
    if found := problems(Path(args.output)): sys.exit('\n'.join(found))
    print(f'{n} pages in {time.time() - started:.0f} s: {Path(args.output)/"index.html"}')
