"""For each code environments that give the advice, and some that must not."""

from tests.environment.cases.case import Case
from tests.environment.cases.configuration import CONFIGURATION
from tests.environment.cases.devices import DEVICES
from tests.environment.cases.folders import FOLDERS
from tests.environment.cases.launching import LAUNCHING
from tests.environment.cases.peers import PEERS
from tests.environment.cases.placement import PLACEMENT
from tests.environment.cases.resuming import RESUMING
from tests.environment.cases.scripts import SCRIPTS
from tests.environment.cases.software import SOFTWARE

CASES: tuple[Case, ...] = (
    *SOFTWARE,
    *CONFIGURATION,
    *DEVICES,
    *PEERS,
    *SCRIPTS,
    *RESUMING,
    *LAUNCHING,
    *FOLDERS,
    *PLACEMENT,
)

__all__ = ["CASES", "Case"]
