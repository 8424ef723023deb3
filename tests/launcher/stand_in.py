"""A service without content, for the launcher's tests: `/readyz`, SIGTERM, and some ways to misbehave.

Run as a script: `stand_in.py PORT [--ready-when FILE] [--exit CODE] [--stubborn] [--busy-until FILE]
[--grandchild FILE] [--note FILE NAME]`. It notes `NAME` in the file when SIGTERM arrives.
"""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-when", type=Path)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--busy-until", type=Path)
    parser.add_argument("--grandchild", type=Path)
    parser.add_argument("--note", nargs=2)
    args = parser.parse_args()
    if args.exit is not None:
        print("stand-in: MILLRACE_SOMETHING: is bad", file=sys.stderr)
        Path(os.environ["MILLRACE_REASON_FILE"]).write_text("MILLRACE_SOMETHING: is bad")
        return int(args.exit)
    if args.grandchild:
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        args.grandchild.write_text(str(process.pid))
    terms = threading.Semaphore(0)

    def on_term(*_: object) -> None:
        if args.note:
            with open(args.note[0], "a") as f:
                f.write(args.note[1] + "\n")
        terms.release()

    signal.signal(signal.SIGTERM, on_term)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = args.ready_when is None or args.ready_when.exists()
            body = json.dumps({"ready": ready, "missing": [] if ready else ["weights"]}).encode()
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not terms.acquire(timeout=0.05):
        if os.getppid() == 1 and args.stubborn:
            continue
    if args.stubborn:
        threading.Event().wait()
    while args.busy_until and not args.busy_until.exists() and not terms.acquire(timeout=0.02):
        continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
