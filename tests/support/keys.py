"""Keys of a fleet whose daemons talk over TCP, and daemons that should not have any."""

import pathlib
import shutil
import socket
import subprocess
import tempfile

from fleet import BIN, SOURCE


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keygen(folder, instance):
    """The public key."""
    done = subprocess.run([str(BIN / "di-ctl"), "keygen", instance, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done
    key, name = done.stdout.split()
    assert name == instance
    return key


class Keyed:
    """A folder of keys, and the rows that make a fleet use them over TCP."""

    def __init__(self, instances, meta=None):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="di-keys-"))
        self.public = {i: keygen(self.folder, i) for i in instances}
        self.meta = meta or f"tcp://127.0.0.1:{free_port()}"

    def rows(self):
        return [f"net.secret_key={self.folder}", f"net.public_keys={self.folder}/public_keys",
                f"meta.endpoint={self.meta}", f"meta.public_key={self.public['di-meta.0']}"]

    def overrides(self, address=lambda instance: "127.0.0.1"):
        rows = [f"{instance}:{row}" for instance in self.public for row in self.rows()]
        rows += [f"{i}:net.bind=tcp://{address(i)}:0" for i in self.public if i != "di-meta.0"]
        return [*rows, f"di-meta.0:net.bind={self.meta}"]

    def list_only(self, keep):
        """The file of public keys with the lines that `keep` wants."""
        path = self.folder / "public_keys"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if keep(line.split()[1])))

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Stranger:
    """One more instance, started by hand."""

    def __init__(self, fleet, keys, instance, *rows, config="etc/local/di-decode.toml", address="127.0.0.1", prefix=()):
        self.log_path = fleet.run / f"{instance}.log"
        command = [*prefix, str(BIN / instance.split(".")[0]), "-f", str(SOURCE / config)]
        for row in [f"run.dir={fleet.run}", f"run.instance={instance}", f"net.bind=tcp://{address}:0", *keys.rows(), *rows]:
            command += ["-o", row]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, cwd=SOURCE, stdout=log, stderr=log)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def close(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def refused(fleet, instance):
    """Refusals by reason."""
    return fleet.metric_by(instance, "di_net_refused_total", "reason")
