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
    parser.add_argument('--only', action='append', default=[], metavar='NAME',
                        help='write only this page, also into an existing site: a notebook, such as 00_metrics, or a '
                             'title; may be repeated')
    args = parser.parse_args()
    started = time.time()
    folder = Path(args.output)
    try: written, known = build(folder, args.jobs, execute=not args.plain, only=args.only)
    except (ValueError, FileExistsError) as e: sys.exit(str(e))
    print(f'checking {len(written)} pages for dead links and other problems', flush=True)
    if found := problems(folder, written, known if args.only else ()): sys.exit('\n'.join(found))
    place = folder/(written[0] if args.only else 'index.html')
    print(f'{len(written)} pages in {time.time() - started:.0f} s: {place}')
