"""Every check, and every topic that they report, in the order of the manual's table. A test compares the two."""

from collections.abc import Callable, Iterable, Mapping

from ckptfix.operations.doctor.advice import Advice, Topic
from ckptfix.operations.doctor.checks import (
    configuration,
    devices,
    folders,
    launching,
    peers,
    placement,
    scripts,
    software,
)
from ckptfix.operations.doctor.facts import Facts

Check = Callable[[Facts], Iterable[Advice]]

_SUBJECTS = (software, configuration, devices, peers, scripts, launching, folders, placement)

CHECKS: tuple[Check, ...] = tuple(check for subject in _SUBJECTS for check in subject.CHECKS)
TOPICS: tuple[Topic, ...] = tuple(topic for subject in _SUBJECTS for topic in subject.TOPICS)
CODES: Mapping[str, Topic] = {topic.code: topic for topic in TOPICS}
