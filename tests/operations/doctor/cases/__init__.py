"""For each code environments that give the advice, and some that must not."""

from tests.operations.doctor.cases.case import Case
from tests.operations.doctor.cases.configuration import CONFIGURATION
from tests.operations.doctor.cases.devices import DEVICES
from tests.operations.doctor.cases.folders import FOLDERS
from tests.operations.doctor.cases.launching import LAUNCHING
from tests.operations.doctor.cases.peers import PEERS
from tests.operations.doctor.cases.placement import PLACEMENT
from tests.operations.doctor.cases.scripts import SCRIPTS
from tests.operations.doctor.cases.software import SOFTWARE

CASES: tuple[Case, ...] = (
    *SOFTWARE,
    *CONFIGURATION,
    *DEVICES,
    *PEERS,
    *SCRIPTS,
    *LAUNCHING,
    *FOLDERS,
    *PLACEMENT,
)

__all__ = ["CASES", "Case"]
