"""Torch, the driver, and which devices are seen."""

from msgspec.structs import replace

from ckptfix.environment.facts.machine import Device
from tests.environment.building import bus, facts, with_machine, with_torch
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

DEVICES = (
    Case(
        "torch-unusable",
        "no torch",
        facts(torch=replace(facts().torch, stage="import", problem="gone")),
        ERROR,
    ),
    Case("torch-unusable", "usable", facts(), None),
    Case(
        "torch-unusable",
        "the driver's fault",
        with_torch(facts(1), stage="devices", problem="killed"),
        None,
    ),
    Case(
        "driver-unusable",
        "hangs",
        with_torch(facts(1), stage="devices", problem="no answer in 120 s"),
        ERROR,
    ),
    Case("driver-unusable", "sees none", with_torch(facts(1), devices=(), kind=""), ERROR),
    Case(
        "driver-unusable",
        "all hidden",
        replace(with_torch(facts(1), devices=()), variables={"CUDA_VISIBLE_DEVICES": ""}),
        None,
    ),
    Case("driver-unusable", "sees it", facts(1), None),
    Case("driver-unusable", "CPU build", facts(), None),
    Case(
        "cpu-only-torch",
        "CPU build",
        with_torch(facts(1), builds=(), devices=(), kind=""),
        WARNING,
    ),
    Case("cpu-only-torch", "no GPU", facts(), None),
    Case("cpu-only-torch", "CUDA build", facts(1), None),
    Case("no-accelerator", "none", facts(), NOTE),
    Case("no-accelerator", "one", facts(1), None),
    Case(
        "visible-devices-broken",
        "too large a number",
        replace(
            with_torch(facts(2), devices=facts(1).torch.devices),
            variables={"CUDA_VISIBLE_DEVICES": "0,7"},
        ),
        WARNING,
    ),
    Case(
        "visible-devices-broken",
        "empty",
        facts(2, variables={"CUDA_VISIBLE_DEVICES": ""}),
        WARNING,
    ),
    Case(
        "visible-devices-broken",
        "twice",
        facts(2, variables={"CUDA_VISIBLE_DEVICES": "1,1"}),
        WARNING,
    ),
    Case(
        "visible-devices-broken",
        "by name",
        facts(2, variables={"CUDA_VISIBLE_DEVICES": "GPU-8a5"}),
        None,
    ),
    Case(
        "visible-devices-broken",
        "right",
        facts(2, variables={"CUDA_VISIBLE_DEVICES": "1,0"}),
        None,
    ),
    Case(
        "hidden-devices",
        "one of two",
        replace(
            with_torch(facts(2), devices=facts(1).torch.devices),
            variables={"CUDA_VISIBLE_DEVICES": "1"},
        ),
        NOTE,
    ),
    Case("hidden-devices", "all", facts(2, variables={"CUDA_VISIBLE_DEVICES": "0,1"}), None),
    Case(
        "device-order",
        "fastest first",
        with_torch(facts(2), devices=facts(2).torch.devices[::-1]),
        NOTE,
    ),
    Case(
        "device-order",
        "by PCI address",
        replace(
            with_torch(facts(2), devices=facts(2).torch.devices[::-1]),
            variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        ),
        None,
    ),
    Case(
        "old-driver-peer-copies",
        "old",
        with_machine(
            with_torch(
                facts(2), devices=tuple(Device(index=index, name="RTX 4090") for index in range(2))
            ),
            driver="535.161.08",
        ),
        WARNING,
    ),
    Case(
        "old-driver-peer-copies",
        "new enough",
        with_torch(
            facts(2), devices=tuple(Device(index=index, name="RTX 4090") for index in range(2))
        ),
        None,
    ),
    Case(
        "old-driver-peer-copies", "another GPU", with_machine(facts(2), driver="535.161.08"), None
    ),
    Case(
        "driver-unusable",
        "torch's own fault",
        with_torch(facts(1), stage="import", problem="gone", devices=()),
        None,
    ),
    Case(
        "driver-unusable",
        "a CUDA build without a GPU",
        with_torch(facts(), builds=("cuda 12.8",)),
        None,
    ),
    Case(
        "driver-unusable",
        "a CPU build next to a GPU",
        with_torch(facts(1), builds=(), devices=()),
        None,
    ),
    Case(
        "cpu-only-torch", "no torch", with_torch(facts(1), version="", builds=(), devices=()), None
    ),
    Case(
        "cpu-only-torch",
        "not known",
        with_torch(facts(1), builds=(), devices=(), problem="killed"),
        None,
    ),
    Case("no-accelerator", "not on the PCI bus", with_machine(facts(1), bus=bus(0)), None),
    Case(
        "no-accelerator", "not known", with_torch(facts(), stage="devices", problem="killed"), None
    ),
    Case("no-accelerator", "there is one, hidden", with_torch(facts(1), devices=()), None),
    Case("visible-devices-broken", "no GPU", facts(variables={"CUDA_VISIBLE_DEVICES": "0"}), None),
    Case(
        "hidden-devices",
        "by other means",
        with_torch(facts(2), devices=facts(1).torch.devices),
        None,
    ),
    Case(
        "hidden-devices",
        "not known",
        replace(
            with_torch(facts(2), devices=facts(1).torch.devices, problem="killed"),
            variables={"CUDA_VISIBLE_DEVICES": "1"},
        ),
        None,
    ),
    Case(
        "device-order",
        "meant",
        replace(
            with_torch(facts(2), devices=facts(2).torch.devices[::-1]),
            variables={"CUDA_VISIBLE_DEVICES": "1,0"},
        ),
        None,
    ),
    Case(
        "device-order",
        "not known",
        with_torch(facts(2), devices=(Device(index=0, pci="0000:01:00.0"), Device(index=1))),
        None,
    ),
    Case(
        "old-driver-peer-copies",
        "one GPU",
        with_machine(
            with_torch(facts(1), devices=(Device(index=0, name="RTX 4090"),)), driver="535.161.08"
        ),
        None,
    ),
    Case(
        "old-driver-peer-copies",
        "not known",
        with_machine(
            with_torch(
                facts(2), devices=tuple(Device(index=index, name="RTX 4090") for index in range(2))
            ),
            driver="",
        ),
        None,
    ),
)
