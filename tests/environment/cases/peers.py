"""What makes copies between devices wrong, and what hides it."""

from msgspec.structs import replace

from ckptfix.environment.facts.machine import PairVerdict
from tests.environment.building import bus, facts, with_machine, with_torch
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

REDIRECTING_ONE = replace(bus(1), redirecting=("0000:00:01.0",))

LINKED = frozenset({frozenset({"0000:01:00.0", "0000:02:00.0"})})

PEERS = (
    Case(
        "pair-not-healthy",
        "wrong",
        with_torch(facts(2), verdicts=(PairVerdict(pair=(0, 1), verdict="wrong", kind="zeros"),)),
        ERROR,
    ),
    Case(
        "pair-not-healthy",
        "not proven",
        with_torch(facts(2), verdicts=(PairVerdict(pair=(0, 1), verdict="inconclusive"),)),
        WARNING,
    ),
    Case("pair-not-healthy", "healthy", facts(2), None),
    Case("pairs-unproven", "not probed", with_torch(facts(2), verdicts=None), NOTE),
    Case("pairs-unproven", "probed", facts(2), None),
    Case("pairs-unproven", "one GPU", facts(1), None),
    Case(
        "nccl-hides-peer-copies",
        "off, two GPUs",
        facts(2, variables={"NCCL_P2P_DISABLE": "1"}),
        WARNING,
    ),
    Case(
        "nccl-hides-peer-copies",
        "near ones only, no GPU",
        facts(variables={"NCCL_P2P_LEVEL": "NVL"}),
        NOTE,
    ),
    Case(
        "nccl-hides-peer-copies",
        "on",
        facts(2, variables={"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}),
        None,
    ),
    Case("iommu-translates", "DMA-FQ", with_machine(facts(2), bus=bus(iommu="DMA-FQ")), WARNING),
    Case("iommu-translates", "identity", with_machine(facts(2), bus=bus(iommu="identity")), None),
    Case(
        "iommu-translates",
        "NVLink",
        with_machine(facts(2), bus=replace(bus(iommu="DMA"), linked=LINKED)),
        None,
    ),
    Case(
        "acs-redirects",
        "redirects",
        with_machine(facts(2), bus=replace(bus(), redirecting=("0000:00:01.0",))),
        WARNING,
    ),
    Case(
        "acs-redirects",
        "NVLink",
        with_machine(facts(2), bus=replace(bus(), redirecting=("0000:00:01.0",), linked=LINKED)),
        None,
    ),
    Case("acs-redirects", "one GPU", with_machine(facts(1), bus=REDIRECTING_ONE), None),
    Case("acs-redirects", "off", facts(2), None),
    Case("distant-pair", "two sockets", with_machine(facts(2), bus=bus(way="SYS")), NOTE),
    Case("distant-pair", "through the CPU", with_machine(facts(2), bus=bus(way="PHB")), NOTE),
    Case(
        "distant-pair",
        "NVLink",
        with_machine(facts(2), bus=replace(bus(way="SYS"), linked=LINKED)),
        None,
    ),
    Case("distant-pair", "one switch", facts(2), None),
)
