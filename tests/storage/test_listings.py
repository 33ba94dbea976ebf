"""Listings: what they hold is what a dict would hold, by folders."""

from ckptfix.storage.listings import Listing
from ckptfix.storage.stores import ObjectInfo


def info(number: int) -> ObjectInfo:
    return ObjectInfo(number << 20, f"{number:032x}", 1_700_000_000_000_000_000 + number)


def test_a_listing_is_a_mapping_with_folders() -> None:
    keys = ["a", "b/c/one", "b/c/two", "b/two", "d\udcff/\u00fc\n", "b/c/three", "zero"]
    objects = {key: info(number) for number, key in enumerate(keys)}
    listing = Listing(objects.items(), 10)
    assert dict(listing) == objects
    assert (len(listing), listing.misfits) == (len(keys), {})
    assert listing["b/c/two"] == objects["b/c/two"]
    assert all(key not in listing for key in ("b", "b/c", "", "b/c/", "none", "b/c/none"))
    assert (listing.folders(""), listing.folders("b"), listing.folders("x")) == (
        ["b", "d\udcff"],
        ["c"],
        None,
    )
    assert list(listing.files("b")) == ["two"]
    assert listing.below("b") == {key[2:]: objects[key] for key in keys if key.startswith("b/")}
    assert listing.below("") == objects
    assert Listing([], 10).below("") == {}


def test_what_no_folder_can_hold_is_a_misfit_where_it_lies() -> None:
    keys = [
        "x/a//b",
        "x/a/c",
        "x/model",
        "x/model/part",
        "y/ok",
        "x/slash/",
        "y/../up",
        "deep/" * 900 + "x",
    ]
    listing = Listing([(key, info(1)) for key in keys], 10)
    assert sorted(listing) == ["x/a/c", "x/model/part", "y/ok"]
    assert len(listing) == 3
    assert "x/model" not in listing
    assert {key: (one.why, one.home) for key, one in listing.misfits.items()} == {
        "x/a//b": ("it contains an empty name", "x/a"),
        "x/model": ("other keys use it as a folder", "x"),
        "x/slash/": ("it ends in a slash", "x/slash"),
        "y/../up": ("it contains '..', which leads to another folder", "y"),
        "deep/" * 900 + "x": ("it has 4501 bytes, too many for a path", ""),
    }
    assert listing.misfits_below("x").keys() == {"a//b", "model", "slash/"}
    assert listing.below("x").keys() == {"a/c", "model/part"}
