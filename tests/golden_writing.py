"""The cases of ``golden_verbs`` for the verbs that write, and the folders that all cases begin with."""

REAL = "accelerate-1.15.0"
CLEAN = f"put {REAL}/clean-safetensors/checkpoint"
DCP = "put dcp-2.13.0/fsdp2-clean/checkpoint"
DOUBLED = f"put {REAL}/student-teacher-wrapper-safetensors/checkpoint"
ZIP = f"put {REAL}/wrapper-bin/checkpoint"
SHARDED = f"put {REAL}/sharded-gpt2/checkpoint"
NESTED = f"put {REAL}/lone-nested-safetensors/checkpoint"
PLAIN = f"put {REAL}/single-level-safetensors/checkpoint"
BARE = f"put {REAL}/lone-bare-safetensors/checkpoint"
TRUNCATED = "put golden/truncated-file/checkpoint"

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
    "expected-plan": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair --dry-run @/checkpoint_1
        ckptfix repair @/checkpoint_1 --expect DIGEST
        ckptfix repair @/checkpoint_1 --expect DIGEST
    """,
    "plan-of-another-state": f"""
        {DOUBLED} @/checkpoint_1
        ckptfix repair --dry-run --models 2 --atomic @/checkpoint_1
        flip @/checkpoint_1/model_1.safetensors 640
        ckptfix repair --models 2 --atomic @/checkpoint_1 --expect DIGEST
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
        ckptfix repair --expect 3f2a somewhere
        ckptfix repair --expect 0123456789ab somewhere elsewhere
        ckptfix repair --plan plan.json
        ckptfix repair --plan-out plan.json somewhere
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
        ckptfix seal @/checkpoint_1
    """,
    "shares-elsewhere": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --shard 0/2 --partial results @/checkpoint_1
        ckptfix seal --shard 1/2 --partial results @/checkpoint_1
        ckptfix seal --partial results @/checkpoint_1
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

MIGRATE = {
    "from-dcp": f"""
        {DCP} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --to safetensors
        ckptfix check new
    """,
    "states": f"""
        {DCP} @/checkpoint_1
        ckptfix migrate @/checkpoint_1 new --state all --to fsdp --processes 1
        ckptfix check new
    """,
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
    "truncated-dcp": """
        put golden/truncated-file-dcp/checkpoint @/checkpoint_1
        ckptfix salvage @/checkpoint_1 new
    """,
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
        ckptfix merge results
        ckptfix migrate @/checkpoint_1 new --to bin --partial results
        ckptfix check new
    """,
    "changed-between": f"""
        {CLEAN} @/checkpoint_1
        ckptfix seal --shard 0/2 --partial results @/checkpoint_1
        flip @/checkpoint_1/model.safetensors 630
        ckptfix seal --shard 1/2 --partial results @/checkpoint_1
        ckptfix seal --partial results @/checkpoint_1
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
