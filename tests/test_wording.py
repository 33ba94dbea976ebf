from ckptfix.wording import collapse_layers, human_size, list_names


def test_collapse_layers() -> None:
    names = [f"layers.{index}.w" for index in range(32)] + ["head", "layers.40.w"]
    assert collapse_layers(names) == ["layers.{0...31,40}.w", "head"]


def test_human_size() -> None:
    assert [human_size(size) for size in (0, 1023, 1536, 10 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 TiB",
    ]


def test_list_names_collapses_before_it_counts() -> None:
    names = [f"layers.{i}.{part}" for part in ("a", "b", "c", "d") for i in range(9)]
    assert list_names(names) == "'layers.{0...8}.a', 'layers.{0...8}.b', 'layers.{0...8}.c' and 1 more"
    assert list_names(["head"]) == "'head'"
