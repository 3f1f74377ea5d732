"""Fleets that grow: a sample and more instances that start later.  Spread, its host labels are machines: every
instance runs in the namespace of its label (network.py), messages go under CURVE, pages over TCP."""

import http.client
import pathlib
import re
import shutil
import signal
import tempfile

from fleet import Fleet, wait_for
from keys import Keyed


def blocks_of(sample):
    """What is before the first instance of a sample's fleet.toml, and the instances by name, with paths that
    hold from anywhere."""
    text = (sample / "fleet.toml").read_text()
    text = re.sub(r'config = "(.*)"', lambda m: f'config = "{(sample / m[1]).resolve()}"', text)
    head, *blocks = text.split("[[instance]]\n")
    return head, {name_of(block): block for block in blocks}


def name_of(block):
    program = re.search(r'program = "([\w-]+)"', block)[1]
    name = re.search(r'name = "(\w+)"', block)
    return f"{program}.{name[1] if name else 0}"


def host_of(block):
    return re.search(r'"net\.host=(\w+)"', block)[1]


class GrowingFleet(Fleet):
    """`spare`: more instances, by name: which one of the sample they are like, and what is written otherwise; or one of
    the sample, like itself.  They start with add_spare(), and may go with retire()."""

    def __init__(self, sample, overrides=(), spare=None, **kwargs):
        self.read_sample(sample, spare)
        self.write()
        super().__init__(str(self.conf_folder), overrides, **kwargs)

    def read_sample(self, sample, spare):
        self.conf_folder = pathlib.Path(tempfile.mkdtemp(prefix="di-conf-"))
        self.head, self.blocks = blocks_of(sample)
        self.spare = {}
        for instance, (model, other) in (spare or {}).items():
            self.spare[instance] = self.blocks[model]
            for old, new in other.items():
                self.spare[instance] = self.spare[instance].replace(old, new)
        self.blocks = {instance: block for instance, block in self.blocks.items() if instance not in self.spare}

    def launcher(self, instance):
        """The line of fleet.toml that says what starts the instance; none: di-up itself."""
        return ""

    def write(self):
        """fleet.toml as self.blocks has it."""
        text = self.head
        for instance, block in self.blocks.items():
            text += f"[[instance]]\n{self.launcher(instance)}{block}"
        (self.conf_folder / "fleet.toml").write_text(text)

    def list_spare(self, *instances):
        for instance in instances:
            self.blocks[instance] = self.spare.pop(instance)
        self.write()

    def add_spare(self, *instances):
        self.list_spare(*instances)
        self.up()

    def retire(self, *instances):
        """Stops them as an operator does, and di-up does not start them again."""
        for instance in instances:
            del self.blocks[instance]
        self.write()
        for instance in instances:
            self.kill(instance, signal.SIGTERM)
            wait_for(lambda instance=instance: not self.alive(instance), f"{instance} to end", 60)

    def close(self):
        try:
            super().close()
        finally:
            shutil.rmtree(self.conf_folder, ignore_errors=True)


class SpreadFleet(GrowingFleet):
    """The spare instances have keys and a machine from the start."""

    def __init__(self, network, sample, overrides=(), sealed=False, spare=None, **kwargs):
        self.network = network
        self.read_sample(sample, spare)
        self.host_of = {instance: host_of(block) for instance, block in {**self.blocks, **self.spare}.items()}
        self.keys = Keyed(self.host_of, meta=f"tcp://{network.address(self.host_of['di-meta.0'])}:7400")
        self.write()
        rows = self.keys.overrides(address=lambda instance: network.address(self.host_of[instance]))
        rows += [f"{i}:transfer.bind={network.address(host)}:0" for i, host in self.host_of.items() if i.startswith("di-kvd.")]
        rows += [f"di-kvd:transfer.seal={'true' if sealed else 'false'}"]
        Fleet.__init__(self, str(self.conf_folder), [*rows, *overrides], **kwargs)

    def launcher(self, instance):
        return f'exec = ["ip", "netns", "exec", "{self.network.namespace(self.host_of[instance])}"]\n'

    def command(self, extra=()):
        # Rows of what is not there would be refused.
        absent = set(self.host_of) - set(self.blocks)
        every = self.overrides
        self.overrides = [row for row in every if row.split(":", 1)[0] not in absent]
        try:
            return super().command(extra)
        finally:
            self.overrides = every

    def connection(self, timeout):
        made = http.client.HTTPConnection(*self.address, timeout=timeout)
        connect = made.connect

        def connect_there():
            with self.network.inside(self.host_of["di-router.0"]):
                connect()
        made.connect = connect_there
        return made

    def close(self):
        super().close()
        self.keys.close()
