"""Compares the Hub cache that `lockstep download` writes with the one that huggingface_hub writes.

    python tools/check_hub_cache.py LOCKSTEP STAND_IN

LOCKSTEP is the program, STAND_IN the built example `hub_stand_in` of crates/testkit. Needs huggingface_hub (pip install
huggingface_hub), and no network: the stand-in serves a small model on the loopback. Checks three things: the two caches
are equal, huggingface_hub reads ours without the network, and lockstep reads the one of huggingface_hub.
"""

import os
import pathlib
import subprocess
import sys
import tempfile


def tree(root):
    """Every file and link below `root`, without lock files and the lists of files that huggingface_hub keeps."""
    found = {}
    for path in sorted(pathlib.Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith(".locks") or path.name == "CACHEDIR.TAG" or "trees" in path.parts:
            continue
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = ("file", path.read_bytes())
    return found


def main():
    lockstep, stand_in = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temp:
        temp = pathlib.Path(temp)
        repo = temp / "repo"
        (repo / "additional_chat_templates").mkdir(parents=True)
        (repo / "config.json").write_text("{}\n")
        (repo / "tokenizer.json").write_text('{"version": "1.0"}\n')
        (repo / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
        (repo / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
        server = subprocess.Popen([stand_in, f"models/org/name={repo}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            endpoint = server.stdout.readline().decode().strip()
            check(lockstep, endpoint, temp)
        finally:
            server.stdin.close()
            server.wait(timeout=10)


def check(lockstep, endpoint, temp):
    ours, theirs = temp / "ours", temp / "theirs"
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "http_proxy", "HTTP_PROXY"):
        env.pop(name, None)

    def download(home, **more):
        command = [lockstep, "download", "org/name"]
        subprocess.run(command, env={**env, "HF_HOME": str(home), **more}, check=True)

    def snapshot_download(home, arguments):
        code = f"from huggingface_hub import snapshot_download; print(snapshot_download('org/name'{arguments}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**env, "HF_HOME": str(home)}, check=True, stdout=subprocess.PIPE)
        return pathlib.Path(done.stdout.decode().strip())

    download(ours)
    snapshot_download(theirs, "")
    mine, other = tree(ours / "hub"), tree(theirs / "hub")
    assert mine == other, f"the caches differ: {sorted(mine)} and {sorted(other)}"
    print(f"equal caches: {len(mine)} files and links")

    folder = snapshot_download(ours, ", local_files_only=True")
    assert folder.parts[-4:-1] == ("hub", "models--org--name", "snapshots"), folder
    assert len((folder / "model.safetensors").read_bytes()) == 256 * 4096
    print("huggingface_hub reads the cache of lockstep")

    download(theirs, HF_HUB_OFFLINE="1")
    print("lockstep reads the cache of huggingface_hub")


main()
