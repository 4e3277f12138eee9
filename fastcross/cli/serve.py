"""fastcross serve: a run, behind HTTP."""

import os
from argparse import Namespace

from fastcross.cli.printing import show
from fastcross.extras import require


def serve(args: Namespace) -> int:
    require("serving", "serve")
    from fastcross.serving.served import Served
    from fastcross.serving.server import serve as serve_run

    if args.key and not args.items:
        raise ValueError("--key has no effect without --items")
    serve_run(
        lambda: Served(args.run, args.items, args.key),
        host=args.host,
        port=args.port,
        threads=args.threads or max(1, (os.cpu_count() or 1) - 1),
        log=show,
        max_batch=args.max_batch,
        max_delay=args.max_delay_ms / 1000,
        max_queue=args.queue,
    )
    return 0
