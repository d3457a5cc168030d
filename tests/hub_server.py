"""A local server that answers as the Hugging Face Hub does, and records what it sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RESOLVE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>refs/pr/\d+|[^/]+)/(?P<file>.+)")
STORED = re.compile(r"/storage/(?P<id>[^/]+/[^/]+)/(?P<commit>[^/]+)/(?P<file>.+)")
LISTING = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/(?P<kind>revision|tree)/(?P<revision>.+)")


class Hub:
    """Repositories, and what was asked for.

    ``gated`` and ``broken`` are ids that the Hub denies, and answers with status 503.  ``sent`` are
    (method, file, bytes) of all answers, ``tokens`` the tokens of all requests, and
    ``storage_tokens`` of those for large files, which another host stores.
    """

    def __init__(self, url):
        self.url = url
        self.clear()

    def clear(self):
        self.commits, self.revisions = {}, {}
        self.gated, self.broken = set(), set()
        self.sent, self.tokens, self.storage_tokens = [], [], []

    def add(self, id, files, revision="main"):
        """Push these files in place of the present ones; returns the commit."""
        commit = hashlib.sha1(f"{id}{revision}{sorted(files.items())}".encode()).hexdigest()
        self.commits[id, commit] = dict(files)
        self.revisions[id, revision] = commit
        return commit

    def commit(self, id, revision):
        """The commit of a revision, which may be a commit itself; ``None`` if there is none."""
        return revision if (id, revision) in self.commits else self.revisions.get((id, revision))

    def bytes_of(self, file):
        """The bytes of a file in all answers."""
        return sum(count for _, name, count in self.sent if name == file)


@contextlib.contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def handle(self):
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub = self.server.hub
        path = urllib.parse.unquote(self.path.partition("?")[0])
        stored = STORED.fullmatch(path)
        if stored is not None:
            hub.storage_tokens.append(self.headers.get("Authorization"))
            files = hub.commits[stored["id"], stored["commit"]]
            return self.send_file(stored["file"], files[stored["file"]], stored["commit"])
        asked = RESOLVE.fullmatch(path) or LISTING.fullmatch(path)
        hub.tokens.append(self.headers.get("Authorization"))
        if asked is None:
            return self.refuse(404, "EntryNotFound")
        id = asked["id"]
        if id in hub.broken:
            return self.refuse(503, "")
        if id in hub.gated:
            return self.refuse(401, "GatedRepo")
        if not any(each == id for each, _ in hub.commits):
            return self.refuse(401, "RepoNotFound")  # as for a private one
        commit = hub.commit(id, asked["revision"])
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        files = hub.commits[id, commit]
        if "file" not in asked.groupdict():
            return self.send_listing(asked["kind"], id, commit, files)
        if asked["file"] not in files:
            return self.refuse(404, "EntryNotFound", commit)
        if asked["file"].endswith(".safetensors"):
            return self.redirect(id, commit, asked["file"], files[asked["file"]])
        return self.send_file(asked["file"], files[asked["file"]], commit)

    def redirect(self, id, commit, file, content):
        """To another host, as for every file in Git LFS."""
        port = self.server.server_port
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{port}/storage/{id}/{commit}/{file}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_listing(self, kind, id, commit, files):
        listing = {"id": id, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        if kind == "tree":
            listing = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in files.items()
            ]
        self.send_file("listing", json.dumps(listing).encode(), commit)

    def send_file(self, name, content, commit):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part, status = content, 200
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            part, status = content[first : last + 1], 206
            if first >= len(content):
                return self.refuse(416, "")
        body = part if self.command == "GET" else b""
        # Recorded first: once a client has the answer, its test may read the record.
        self.server.hub.sent.append((self.command, name, len(body)))
        self.send_response(status)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(part)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client needs no more
            self.wfile.write(body)
        return None

    def refuse(self, status, code, commit=None):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
