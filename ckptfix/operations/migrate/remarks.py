"""What a user must know of a new checkpoint before relying on it, as it cannot be seen or mended here."""

from collections.abc import Iterator

from ckptfix.checkpoint.filenames import FileName, Role, parse_file_name, parse_folder_name
from ckptfix.operations.migrate.config import NAME
from ckptfix.operations.migrate.planning import MigrationPlan
from ckptfix.storage.paths import command
from ckptfix.weights.stored import Format


def not_checked_of(plan: MigrationPlan, *, is_guarded: bool) -> tuple[str, ...]:
    """Return in words what a plan leaves open. ``is_guarded``: the source has the manifest of a guarded save."""
    words = []
    if not plan.options.verify:
        words.append("that the new files hold what the old ones do (--no-verify)")
    names = [parse_folder_name(path.parts[0]) or parse_file_name(str(path)) for path in plan.carried]
    roles = {parsed.role for parsed in names if parsed is not None}
    if plan.options.keys is not None and Role.OPTIMIZER in roles:
        words.append(
            "names of parameters inside of optimizers, which are copied unchanged; next: "
            f"{command('repair', plan.output, '', '--keys', plan.options.keys.value)}"
        )
    if _may_lack_names(plan, is_guarded=is_guarded):
        reader = "dcp.load" if plan.options.to is Format.DCP else "load_state of pytorch_model.bin"
        words.append(
            "whether tied weights had other names: safetensors files leave those out, there is no manifest of a "
            f"guarded save that has them, and {reader} looks for every name; where one is missing: save the "
            "source again with ckptfix.Accelerator, or load it into its model and save that"
        )
    return tuple(words)


def _may_lack_names(plan: MigrationPlan, *, is_guarded: bool) -> bool:
    """Whether the writer of the source left out names that the new format's readers look for.

    ``save_state`` and ``save_pretrained`` do, and record nothing; readers of ``.bin`` files of the latter tie again.
    """
    source = plan.source
    config = (*plan.carried, *(file.path for file in plan.rewritten))
    is_pretrained = any(path.name == NAME.name for path in config)
    if is_guarded or plan.options.to is Format.SAFETENSORS:
        return False
    reads_all = is_pretrained and plan.options.to is Format.DCP
    return any(
        one.format is Format.SAFETENSORS and not one.ties
        for one in source.weights
        if reads_all or (source.is_save_state and not one.home.parts)
    )


def unfit_optimizers(plan: MigrationPlan) -> Iterator[str]:
    """Yield in words which optimizers stay in a layout that the loader of the new models does not look for."""
    if any(one.format is Format.DEEPSPEED for one in plan.source.weights):
        return
    to_dcp = plan.options.to is Format.DCP
    found = sorted(
        {
            path.parts[0]
            for path in plan.carried
            for parsed in (parse_folder_name(path.parts[0]) or parse_file_name(path.parts[0]),)
            if parsed is not None
            and parsed.role is Role.OPTIMIZER
            and (len(path.parts) == 1) is to_dcp
            and not (isinstance(parsed, FileName) and parsed.is_of_trainer)
        }
    )
    if found:
        looks = (
            "load_state under FSDP looks for optimizer_0/" if to_dcp else "load_state looks for optimizer.bin"
        )
        yield (
            f"{', '.join(found[:3])}: copied in the layout of the source, and next to models in the new format "
            f"{looks}: the models can be loaded, the complete state cannot"
        )
