"""The cases of ``golden_verbs``: by verb and name, scripts of a few lines."""

from collections.abc import Mapping

REAL = "accelerate-1.15.0"
CLEAN = f"put {REAL}/clean-safetensors/checkpoint"
DOUBLED = f"put {REAL}/student-teacher-wrapper-safetensors/checkpoint"
ZIP = f"put {REAL}/wrapper-bin/checkpoint"
SHARDED = f"put {REAL}/sharded-gpt2/checkpoint"
NESTED = f"put {REAL}/lone-nested-safetensors/checkpoint"
PLAIN = f"put {REAL}/single-level-safetensors/checkpoint"
BARE = f"put {REAL}/lone-bare-safetensors/checkpoint"
TRUNCATED = "put golden/truncated-file/checkpoint"

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
        ckptfix merge results
        ckptfix check -r @ --shard 1/2 --partial results
        ckptfix merge results
    """,
    "wrong-usage": """
        ckptfix check
        ckptfix check --no-such-option somewhere
        ckptfix check --format yaml somewhere
        ckptfix check --shard 2/2 somewhere
        ckptfix check ftp://host/checkpoint
    """,
}

REPAIR = {
    "dry-run": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair --dry-run @/checkpoint_1
        ckptfix repair --dry-run -v @/checkpoint_1
        ckptfix repair --dry-run -q @/checkpoint_1
    """,
    "twice": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix check -q @/checkpoint_1
    """,
    "quiet": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair -q @/checkpoint_1
    """,
    "atomic": f"""
        {NESTED} @/checkpoint_1
        ckptfix repair --atomic @/checkpoint_1
    """,
    "rename-in-place": f"""
        {NESTED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
    """,
    "shards": f"""
        put {REAL}/sharded-gpt2-nested/checkpoint @/checkpoint_1
        ckptfix repair @/checkpoint_1
    """,
    "zip": f"""
        {ZIP} @/checkpoint_1
        ckptfix repair @/checkpoint_1
    """,
    "dcp": """
        put golden/nested-prefix-dcp/checkpoint @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix repair --allow nested-prefix @/checkpoint_1
    """,
    "sealed": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix seal --force @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix verify @/checkpoint_1
    """,
    "nothing-to-do": f"""
        {CLEAN} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix repair --dry-run @/checkpoint_1
    """,
    "only-told": f"""
        {TRUNCATED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
    """,
    "several": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix repair @/checkpoint_1 @/checkpoint_2
    """,
    "output": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1 --output @/checkpoint_2
        ckptfix repair @/checkpoint_1 --output @/checkpoint_2
    """,
    "output-elsewhere": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1 --output copy
    """,
    "saved-plan": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1 --plan-out plan.json
        ckptfix repair --plan plan.json
        ckptfix repair --plan plan.json
    """,
    "plan-of-another-state": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1 --plan-out plan.json
        flip @/checkpoint_1/model_1.safetensors 640
        ckptfix repair --plan plan.json
    """,
    "after-a-kill": """
        only folder
        thaw 0.5.0/drop "rename model_1.safetensors"
        ckptfix check @/checkpoint
        ckptfix repair --dry-run @/checkpoint
        ckptfix repair @/checkpoint
        ckptfix repair @/checkpoint
    """,
    "after-a-kill-in-a-store": """
        only s3
        thaw stores/0.5.0/drop "delete_object model_1.safetensors"
        ckptfix check s3://simulated/run/checkpoint_7
        ckptfix repair --dry-run s3://simulated/run/checkpoint_7
        ckptfix repair s3://simulated/run/checkpoint_7
        ckptfix repair --break-lock s3://simulated/run/checkpoint_7
        ckptfix repair s3://simulated/run/checkpoint_7
    """,
    "options": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair --dry-run --models 3 @/checkpoint_1
        ckptfix repair --dry-run --keys bare @/checkpoint_1
        ckptfix repair --dry-run --only shifted-entries @/checkpoint_1
        ckptfix repair --only no-such-code @/checkpoint_1
    """,
    "not-there": """
        write @/checkpoint_1/notes.txt words
        ckptfix repair @/checkpoint_1
        ckptfix repair @/checkpoint_2
    """,
    "refused-by-the-store": f"""
        only s3
        {DOUBLED} @/checkpoint_1
        refuse @/checkpoint_1/model_1.safetensors
        ckptfix repair @/checkpoint_1
    """,
    "a-link-to-itself": f"""
        only folder
        {DOUBLED} @/checkpoint_1
        link @/checkpoint_1/model_1.safetensors model_1.safetensors
        ckptfix repair @/checkpoint_1
    """,
    "wrong-usage": """
        ckptfix repair
        ckptfix repair --keep nothing somewhere
        ckptfix repair --plan nowhere.json
        ckptfix repair --plan-out plan.json --dry-run somewhere
    """,
}

UNDO = {
    "after-repair": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix undo @/checkpoint_1
        ckptfix undo @/checkpoint_1
    """,
    "zip": f"""
        {ZIP} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix undo @/checkpoint_1
    """,
    "two-repairs": f"""
        put {REAL}/sharded-gpt2-nested/checkpoint @/checkpoint_1
        ckptfix repair @/checkpoint_1
        ckptfix repair --keys bare @/checkpoint_1
        ckptfix undo @/checkpoint_1
        ckptfix undo @/checkpoint_1
    """,
    "quiet": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair -q @/checkpoint_1
        ckptfix undo -q @/checkpoint_1
    """,
    "several": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix repair -q @/checkpoint_2
        ckptfix undo @/checkpoint_1 @/checkpoint_2
    """,
    "changed-since": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        write @/checkpoint_1/model_1.safetensors changed
        ckptfix undo @/checkpoint_1
        ckptfix undo --force @/checkpoint_1
    """,
    "a-name-taken-since": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair @/checkpoint_1
        write @/checkpoint_1/model_2.safetensors new
        ckptfix undo @/checkpoint_1
    """,
    "after-a-kill": """
        only folder
        thaw 0.5.0/drop "rename 0.trash"
        ckptfix check @/checkpoint
        ckptfix undo @/checkpoint
        ckptfix undo @/checkpoint
    """,
    "after-a-killed-repair": """
        only folder
        thaw 0.5.0/drop "rename model_1.safetensors"
        ckptfix undo @/checkpoint
    """,
    "after-a-kill-in-a-store": """
        only s3
        thaw stores/0.5.0/drop "complete_multipart_upload model_1.safetensors"
        ckptfix check s3://simulated/run/checkpoint_7
        ckptfix undo s3://simulated/run/checkpoint_7
        ckptfix undo --break-lock s3://simulated/run/checkpoint_7
        ckptfix undo s3://simulated/run/checkpoint_7
    """,
    "nothing-to-undo": f"""
        {CLEAN} @/checkpoint_1
        ckptfix undo @/checkpoint_1
        ckptfix undo @/checkpoint_2
    """,
    "wrong-usage": """
        ckptfix undo
        ckptfix undo --dry-run somewhere
    """,
}

SEAL = {
    "healthy": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal @/checkpoint_1
        ckptfix seal @/checkpoint_1
        ckptfix seal -q @/checkpoint_1
    """,
    "no-tensors": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --no-tensors @/checkpoint_1
    """,
    "ranges": f"""
        {SHARDED} @/checkpoint_1
        ckptfix seal --ranges @/checkpoint_1
    """,
    "statements": f"""
        {SHARDED} @/checkpoint_1
        ckptfix seal --oms @/checkpoint_1
    """,
    "damaged": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix seal @/checkpoint_1
        ckptfix seal --force @/checkpoint_1
    """,
    "changed-since": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal @/checkpoint_1
        flip @/checkpoint_1/model.safetensors 630
        ckptfix seal @/checkpoint_1
        ckptfix seal --force @/checkpoint_1
    """,
    "several": f"""
        {CLEAN} @/checkpoint_1
        {DOUBLED} @/checkpoint_2
        ckptfix seal @/checkpoint_1 @/checkpoint_2
    """,
    "shares": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --shard 0/2 @/checkpoint_1
        ckptfix merge @/checkpoint_1
        ckptfix seal --shard 1/2 @/checkpoint_1
        ckptfix merge @/checkpoint_1
    """,
    "shares-elsewhere": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --shard 0/2 --partial results @/checkpoint_1
        ckptfix seal --shard 1/2 --partial results @/checkpoint_1
        ckptfix merge results
        ckptfix verify @/checkpoint_1
    """,
    "refused-by-the-store": f"""
        only s3
        {CLEAN} @/checkpoint_1
        refuse @/checkpoint_1/model.safetensors
        ckptfix seal @/checkpoint_1
    """,
    "a-link-to-itself": f"""
        only folder
        {CLEAN} @/checkpoint_1
        link @/checkpoint_1/model.safetensors model.safetensors
        ckptfix seal @/checkpoint_1
    """,
    "not-there": """
        write @/checkpoint_1/notes.txt words
        ckptfix seal @/checkpoint_1
        ckptfix seal @/checkpoint_2
    """,
    "wrong-usage": """
        ckptfix seal
        ckptfix seal --shard 1 somewhere
        ckptfix seal --sign key.pem --sigstore somewhere
        ckptfix seal --with-sha256 somewhere
    """,
}

SEALED = f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal -q @/checkpoint_1"""
VERIFY = {
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
        {CLEAN} @/checkpoint_2
        put {REAL}/clean-bin/checkpoint other
        ckptfix verify @/checkpoint_1 --against @/checkpoint_2
        ckptfix verify @/checkpoint_1 --against other
        flip @/checkpoint_2/model.safetensors 630
        ckptfix verify @/checkpoint_1 --against @/checkpoint_2
        ckptfix verify @/checkpoint_1 --against @/checkpoint_3
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
        ckptfix merge results
        ckptfix verify @/checkpoint_1 --shard 1/2 --partial results
        ckptfix merge results
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
        ckptfix merge results
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

MIGRATE = {
    "dry-run": f"""
        {CLEAN} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to bin --dry-run
        ckptfix migrate @/checkpoint_1 new --to dcp --dry-run
        ckptfix migrate @/checkpoint_1 new --to bin --dry-run -q
    """,
    "there-and-back": f"""
        {CLEAN} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to bin
        ckptfix migrate new back --to safetensors
        ckptfix diff @/checkpoint_1 back
        ckptfix migrate @/checkpoint_1 new --to bin
        ckptfix migrate -q --overwrite @/checkpoint_1 new --to bin
    """,
    "to-a-url": f"""
        {CLEAN} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 @/checkpoint_2 --to bin
    """,
    "shards-and-keys": f"""
        {NESTED} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to safetensors
        ckptfix migrate @/checkpoint_1 new --to safetensors --keys bare --max-shard-size 200B
        ckptfix check new
    """,
    "dtype": f"""
        {BARE} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to safetensors --dtype bf16
    """,
    "refused": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to bin
        ckptfix migrate @/checkpoint_1 new --to bin --allow-damage
    """,
    "truncated": f"""
        {TRUNCATED} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to safetensors
    """,
    "not-there": """
        write @/checkpoint_1/notes.txt words
        ckptfix migrate @/checkpoint_1 new --to bin
        ckptfix migrate @/checkpoint_2 new --to bin
    """,
    "wrong-usage": """
        ckptfix migrate one two
        ckptfix migrate one two --to zip
        ckptfix migrate one two --to fsdp
        ckptfix migrate one two --to bin --max-shard-size big
    """,
}

SALVAGE = {
    "truncated": f"""
        {TRUNCATED} @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
        ckptfix check new
        ckptfix salvage @/checkpoint_1 new
    """,
    "truncated-zip": """
        put golden/truncated-file-zip/checkpoint @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
        ckptfix salvage -q @/checkpoint_1 other
    """,
    "crc": """
        put golden/crc-mismatch/checkpoint @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
        ckptfix salvage --keep-damaged @/checkpoint_1 other
    """,
    "healthy": f"""
        {CLEAN} @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
    """,
    "to-a-url": f"""
        {TRUNCATED} @/checkpoint_1
        ckptfix salvage @/checkpoint_1 @/checkpoint_2
    """,
    "nothing-left": """
        put golden/not-a-tensor-file-html/checkpoint @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
    """,
    "not-there": """
        write @/checkpoint_1/notes.txt words
        ckptfix salvage @/checkpoint_1 new
        ckptfix salvage @/checkpoint_2 new
    """,
    "wrong-usage": """
        ckptfix salvage somewhere
        ckptfix salvage one two three
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

UPLOAD = {
    "complete": f"""
        only s3
        {CLEAN} local
        ckptfix upload local @/checkpoint_1
        ckptfix check @/checkpoint_1
        ckptfix upload local @/checkpoint_1
        ckptfix upload --overwrite local @/checkpoint_1
        ckptfix upload -q --overwrite local @/checkpoint_1
    """,
    "sealed": f"""
        only s3
        {CLEAN} local
        ckptfix seal -q local
        ckptfix upload local @/checkpoint_1
        ckptfix verify @/checkpoint_1
    """,
    "in-a-run": f"""
        only s3
        {CLEAN} @/checkpoint_0
        {DOUBLED} local
        ckptfix upload local @/checkpoint_0
        ckptfix upload local @/checkpoint_1
    """,
    "truncated": f"""
        only s3
        {TRUNCATED} local
        ckptfix upload local @/checkpoint_1
    """,
    "not-there": """
        only s3
        write local/notes.txt words
        ckptfix upload local @/checkpoint_1
        ckptfix upload nowhere @/checkpoint_1
        ckptfix upload local elsewhere
    """,
    "to-a-folder": f"""
        {CLEAN} local
        ckptfix upload local elsewhere
    """,
    "wrong-usage": """
        ckptfix upload somewhere
    """,
}

MERGE = {
    "nothing-there": f"""
        {CLEAN} @/checkpoint_1
        write results/notes.txt words
        ckptfix merge results
        ckptfix merge nowhere
        ckptfix merge @/checkpoint_1
    """,
    "migrate": f"""
        {CLEAN} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to bin --shard 0/2 --partial results
        ckptfix merge -q results
        ckptfix migrate @/checkpoint_1 new --to bin --shard 1/2 --partial results
        ckptfix merge results
        ckptfix check new
    """,
    "changed-between": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --shard 0/2 --partial results @/checkpoint_1
        flip @/checkpoint_1/model.safetensors 630
        ckptfix seal --shard 1/2 --partial results @/checkpoint_1
        ckptfix merge results
    """,
    "resumed": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --partial results @/checkpoint_1
        ckptfix verify --partial results @/checkpoint_1
    """,
    "wrong-usage": """
        ckptfix merge
        ckptfix merge one two
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
