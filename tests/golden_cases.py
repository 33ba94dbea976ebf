"""The cases of ``golden_verbs``: by verb and name, scripts of a few lines. Those of verbs that write are in
``golden_writing``.
"""

from collections.abc import Mapping

from tests.golden_writing import (
    CLEAN,
    DCP,
    DOUBLED,
    MERGE,
    MIGRATE,
    PLAIN,
    REAL,
    REPAIR,
    SALVAGE,
    SEAL,
    SHARDED,
    TRUNCATED,
    UNDO,
    UPLOAD,
)

CHECK = {
    "healthy": f"""
        {CLEAN} @/checkpoint_1
        ckptfix check @/checkpoint_1
        ckptfix check -v @/checkpoint_1
        ckptfix check -q @/checkpoint_1
        ckptfix check --data @/checkpoint_1
    """,
    "healthy-shards": f"""
        {SHARDED} @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "damaged": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix check @/checkpoint_1
        ckptfix check -q @/checkpoint_1
        ckptfix check -0 @/checkpoint_1
        ckptfix check -v @/checkpoint_1
    """,
    "truncated": f"""
        {TRUNCATED} @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "crc": """
        put golden/crc-mismatch/checkpoint @/checkpoint_1
        ckptfix check @/checkpoint_1
        ckptfix check --data @/checkpoint_1
    """,
    "dcp": """
        put golden/nested-prefix-dcp/checkpoint @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "a-name-to-quote": f"""
        {DOUBLED} "@/it's mine/a b"
        ckptfix check "@/it's mine/a b"
        ckptfix check -q "@/it's mine/a b"
    """,
    "formats": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix check --format sarif @/checkpoint_1
        ckptfix check --format github @/checkpoint_1
        ckptfix check --format jsonl @/checkpoint_1
        ckptfix check --format jsonl @/checkpoint_2
    """,
    "unsafe-pickle": """
        put golden/unsafe-pickle/checkpoint @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "several": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix check @/checkpoint_1 @/checkpoint_2
        ckptfix check -q @/checkpoint_1 @/checkpoint_2
        ckptfix check @/checkpoint_1 @/checkpoint_1
        ckptfix check @/checkpoint_1 @/checkpoint_3
    """,
    "here-and-there": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} other
        ckptfix check @/checkpoint_1 other
    """,
    "healthy-dcp": f"""
        {DCP} @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "recursive": f"""
        {CLEAN} @/a/checkpoint_1
        {DOUBLED} @/a/checkpoint_2
        {TRUNCATED} @/b/checkpoint_1
        ckptfix check -r @
        ckptfix check -rq @
        ckptfix check -r --format jsonl @
    """,
    "recursive-nothing": """
        write @/notes.txt words
        ckptfix check -r @
    """,
    "a-folder-of-checkpoints": f"""
        {CLEAN} @/checkpoint_1
        {CLEAN} @/checkpoint_2
        ckptfix check @
    """,
    "a-file": f"""
        {CLEAN} @/checkpoint_1
        ckptfix check @/checkpoint_1/model.safetensors
        ckptfix check @/checkpoint_1/no.safetensors
    """,
    "not-existing": """
        write @/notes.txt words
        ckptfix check @/checkpoint_1
        ckptfix check -r @/checkpoint_1
    """,
    "empty-folder": """
        folder @/checkpoint_1
        ckptfix check @/checkpoint_1
    """,
    "no-checkpoint": """
        write @/checkpoint_1/notes.txt words
        ckptfix check @/checkpoint_1
    """,
    "refused-by-the-store": f"""
        only s3
        {CLEAN} @/checkpoint_1
        refuse @/checkpoint_1/model.safetensors
        ckptfix check @/checkpoint_1
    """,
    "a-link-to-itself": f"""
        only folder
        {CLEAN} @/checkpoint_1
        link @/checkpoint_1/model.safetensors model.safetensors
        ckptfix check @/checkpoint_1
    """,
    "shares": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix check -r @ --shard 0/2 --partial results
        ckptfix check -r @ --shard 1/2 --partial results
        ckptfix check -r @ --partial results
    """,
    "wrong-usage": """
        ckptfix check
        ckptfix check --no-such-option somewhere
        ckptfix check --format yaml somewhere
        ckptfix check --shard 2/2 somewhere
        ckptfix check ftp://host/checkpoint
    """,
}

SEALED = f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal -q @/checkpoint_1"""
VERIFY = {
    "dcp": f"""
        {DCP} @/checkpoint_1
        ckptfix seal @/checkpoint_1
        ckptfix verify @/checkpoint_1
    """,
    "sealed": f"""{SEALED}
        ckptfix verify @/checkpoint_1
        ckptfix verify -q @/checkpoint_1
        ckptfix verify --data @/checkpoint_1
    """,
    "flipped-byte": f"""{SEALED}
        flip @/checkpoint_1/model.safetensors 630
        ckptfix verify @/checkpoint_1
        ckptfix verify -q @/checkpoint_1
        ckptfix verify --format jsonl @/checkpoint_1
    """,
    "shorter-missing-new": f"""{SEALED}
        cut @/checkpoint_1/model.safetensors 600
        remove @/checkpoint_1/random_states_1.pkl
        write @/checkpoint_1/new.txt words
        ckptfix verify @/checkpoint_1
    """,
    "no-manifest": f"""
        {CLEAN} @/checkpoint_1
        ckptfix verify @/checkpoint_1
        ckptfix verify -q @/checkpoint_1
    """,
    "broken-manifest": f"""{SEALED}
        write @/checkpoint_1/.ckptfix/manifest.json '{{"files'
        ckptfix verify @/checkpoint_1
    """,
    "values": """
        put golden-verbs/large-values/checkpoint @/checkpoint_1
        ckptfix verify --data @/checkpoint_1
    """,
    "against": f"""
        {CLEAN} @/checkpoint_1
        ckptfix verify @/checkpoint_1 --against @/checkpoint_2
    """,
    "sha256sums": f"""
        {PLAIN} @/checkpoint_1
        write sums.txt "{"0" * 64}  model.safetensors\\\\n"
        ckptfix verify @/checkpoint_1 --sha256sums sums.txt
    """,
    "statements": f"""
        {SHARDED} @/checkpoint_1
        ckptfix seal -q --oms @/checkpoint_1
        ckptfix verify @/checkpoint_1 --oms @/checkpoint_1/model.oms.json
    """,
    "shares": f"""{SEALED}
        ckptfix verify @/checkpoint_1 --shard 0/2 --partial results
        ckptfix verify @/checkpoint_1 --partial results
        ckptfix verify @/checkpoint_1 --shard 1/2 --partial results
        ckptfix verify @/checkpoint_1 --partial results
    """,
    "refused-by-the-store": f"""
        only s3{SEALED}
        refuse @/checkpoint_1/model.safetensors
        ckptfix verify @/checkpoint_1
    """,
    "a-link-to-itself": f"""
        only folder{SEALED}
        link @/checkpoint_1/model.safetensors model.safetensors
        ckptfix verify @/checkpoint_1
    """,
    "not-there": """
        write @/checkpoint_1/notes.txt words
        ckptfix verify @/checkpoint_1
        ckptfix verify @/checkpoint_2
    """,
    "wrong-usage": """
        ckptfix verify
        ckptfix verify one two
        ckptfix verify somewhere --signature file.sig
        ckptfix verify somewhere --shard 0/2
        ckptfix verify somewhere --repeats 0
    """,
}

DIFF = {
    "dcp": f"""
        {DCP} @/checkpoint_1
        put dcp-2.13.0/fsdp2-parts/checkpoint @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2
    """,
    "equal": f"""
        {CLEAN} @/checkpoint_1
        {CLEAN} @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2
        ckptfix diff --all @/checkpoint_1 @/checkpoint_2
        ckptfix diff -q @/checkpoint_1 @/checkpoint_2
    """,
    "other-format": f"""
        put {REAL}/lone-bare-safetensors/checkpoint @/checkpoint_1
        put {REAL}/lone-bare-bin/checkpoint @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2
    """,
    "different": f"""
        {CLEAN} @/checkpoint_1
        {CLEAN} @/checkpoint_2
        flip @/checkpoint_2/model.safetensors 630
        ckptfix diff @/checkpoint_1 @/checkpoint_2
        ckptfix diff -q @/checkpoint_1 @/checkpoint_2
        ckptfix diff --atol 1000 --rtol 1 @/checkpoint_1 @/checkpoint_2
    """,
    "other-model": f"""
        {CLEAN} @/checkpoint_1
        {SHARDED} @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2
    """,
    "with-a-folder-here": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} other
        ckptfix diff @/checkpoint_1 other
    """,
    "truncated": f"""
        {TRUNCATED} @/checkpoint_1
        {CLEAN} @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2
    """,
    "shares": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix diff @/checkpoint_1 @/checkpoint_2 --shard 0/2 --partial results
        ckptfix diff @/checkpoint_1 @/checkpoint_2 --shard 1/2 --partial results
        ckptfix diff @/checkpoint_1 @/checkpoint_2 --partial results
    """,
    "not-there": f"""
        {CLEAN} @/checkpoint_1
        ckptfix diff @/checkpoint_1 @/checkpoint_2
        ckptfix diff @/checkpoint_2 @/checkpoint_1
    """,
    "wrong-usage": """
        ckptfix diff somewhere
        ckptfix diff one two --atol -1
        ckptfix diff one two --atol many
    """,
}

SCRUB = {
    "two-nights": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal -q @/checkpoint_1
        ckptfix scrub @ --state state.sqlite
        ckptfix scrub @ --state state.sqlite --max-age 30d
        ckptfix scrub @ --state state.sqlite --max-age 30d -q
        flip @/checkpoint_1/model.safetensors 630
        ckptfix scrub @ --state state.sqlite --max-age 30d
        ckptfix scrub @ --state state.sqlite --max-age 30d -q
    """,
    # The path of a file decides to which share it belongs, and that of a temporary folder differs.
    "halves": f"""
        only s3
        {CLEAN} @/checkpoint_1
        ckptfix seal -q @/checkpoint_1
        ckptfix scrub @ --state state.sqlite --read-data-subset 0/2
        ckptfix scrub @ --state state.sqlite --read-data-subset 1/2
        ckptfix scrub @ --state other.sqlite --read-data-subset 0%
    """,
    "damaged": f"""
        {CLEAN} @/a/checkpoint_1
        {DOUBLED} @/a/checkpoint_2
        {TRUNCATED} @/b/checkpoint_1
        ckptfix scrub @ --state state.sqlite
        ckptfix scrub @ --state state.sqlite --format jsonl
    """,
    "shares": f"""
        only s3
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix scrub @ --state state.sqlite --shard 0/2
        ckptfix scrub @ --state state.sqlite --shard 1/2
    """,
    "nothing-there": """
        write @/notes.txt words
        ckptfix scrub @ --state state.sqlite
        ckptfix scrub @/no --state state.sqlite
    """,
    "wrong-usage": """
        ckptfix scrub
        ckptfix scrub somewhere --state state.sqlite --max-age soon
        ckptfix scrub somewhere --state state.sqlite --read-data-subset 0
    """,
}

OTHERS = {
    "run": {
        "a-script": """
            write train.py "import sys\\nprint('said', sys.argv[1:])\\nsys.exit(7)\\n"
            ckptfix run train.py --json 5
        """,
        "wrong-usage": """
            ckptfix run nowhere.py
            ckptfix run --on-reprepare never nowhere.py
        """,
    },
    "prove-resume": {
        "wrong-usage": """
            ckptfix prove-resume
            ckptfix prove-resume --steps 1 -- train.py
            ckptfix prove-resume -- nowhere.py
            ckptfix prove-resume --output runs -- nowhere.py
            ckptfix prove-resume --output out --keep out -- nowhere.py
        """,
    },
    "doctor": {
        "a-script": """
            write train.py "print('no accelerator')\\n"
            ckptfix doctor --script train.py
            ckptfix doctor -q --script train.py
        """,
        "not-there": """
            ckptfix doctor --script nowhere.py
            ckptfix doctor nowhere
            ckptfix doctor --device-map nowhere.json
        """,
        "wrong-usage": """
            ckptfix doctor one two
            ckptfix doctor --seed -1
            ckptfix doctor --seed 1
        """,
    },
    "explain": {
        "codes": """
            ckptfix explain shifted-entries
            ckptfix explain doubled-modle
            ckptfix explain
        """,
    },
    "help": {
        "pages": """
            ckptfix help
            ckptfix help nonsense
        """,
    },
    "ckptfix": {
        "itself": """
            ckptfix --version
            ckptfix --help
            ckptfix
            ckptfix chekc runs
            ckptfix runs
            ckptfix --no-such-option
        """,
    },
}

CASES: Mapping[str, Mapping[str, str]] = {
    "check": CHECK,
    "repair": REPAIR,
    "undo": UNDO,
    "seal": SEAL,
    "verify": VERIFY,
    "diff": DIFF,
    "migrate": MIGRATE,
    "salvage": SALVAGE,
    "scrub": SCRUB,
    "upload": UPLOAD,
    "merge": MERGE,
    **OTHERS,
}
