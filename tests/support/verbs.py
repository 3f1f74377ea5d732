"""Fleets whose di-kvd is the shipped one with softverbs (tests/support/softverbs) in the place of libibverbs."""

import pathlib
import shutil
import tempfile

from fleet import BIN

SOFTVERBS = BIN / "softverbs" / "di-kvd"
VERBS = ["di-kvd:transfer.kind=verbs", 'di-kvd:transfer.rails=["softverbs0/1/0", "softverbs1/1/0"]']


class OverVerbs:
    """Before a Fleet in the list of bases: its programs come from a folder where di-kvd is the other one."""

    def environment(self):
        if not hasattr(self, "programs"):
            self.programs = pathlib.Path(tempfile.mkdtemp(prefix="di-programs-"))
            for program in BIN.glob("di-*"):
                (self.programs / program.name).symlink_to(SOFTVERBS if program.name == "di-kvd" else program)
        return dict(super().environment(), DI_BIN=str(self.programs))

    def close(self):
        try:
            super().close()
        finally:
            shutil.rmtree(self.programs, ignore_errors=True)
