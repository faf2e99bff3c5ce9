//! Broken checkpoints, and resuming what cannot be resumed.

use serde_json::Value;
use zf_tests::golden;

use super::bench::{self, Place, Row, check, run_well};

const LAST: &str = "old/checkpoints/step-2";
const FILE: &str = "old/checkpoints/step-2/rank-00000-of-00002.safetensors";
const MANIFEST: &str = "old/checkpoints/step-2/manifest.json";
const FROM_LAST: &str = "train base.toml -o run.steps=3 --out new --resume old/checkpoints/step-2";
const AUTO: &str = "train base.toml -o run.steps=3 --out old --resume auto";

/// A run of two steps with a checkpoint after each, made once.
struct Finished(tempfile::TempDir);

impl Finished {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("base.toml"), bench::base()).expect("a run file");
        let words = "train base.toml -o run.steps=2 -o run.checkpoint.every=1 --out old";
        run_well(folder.path(), &words.split(' ').collect::<Vec<_>>());
        Self(folder)
    }

    /// Copies it to `old`.
    fn put(&self, place: &Place) {
        place.base();
        place.copy(&self.0.path().join("old"), "old");
    }
}

/// Lets a row start from the finished run.
fn from<'a>(finished: &'a Finished) -> impl Fn(&str, &str, &[&str], fn(&Place)) -> Row<'a> {
    move |name, command, says, damage| {
        Row::new(name, command, says, move |place| {
            finished.put(place);
            damage(place);
        })
    }
}

fn edit(place: &Place, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(place.path(name)).expect("a file of the checkpoint");
    edit(&mut bytes);
    place.write(name, bytes);
}

fn truncate(place: &Place) {
    edit(place, FILE, |bytes| bytes.truncate(bytes.len() / 2));
}

fn flip(place: &Place) {
    edit(place, FILE, |bytes| *bytes.last_mut().expect("not empty") ^= 1);
}

fn remove(place: &Place, name: &str) {
    std::fs::remove_file(place.path(name)).expect("a file of the checkpoint");
}

/// Edits the manifest's JSON and leaves its seal.
fn manifest(place: &Place, change: impl FnOnce(&mut Value)) {
    edit(place, MANIFEST, |bytes| {
        let mut value = serde_json::from_slice(bytes).expect("JSON");
        change(&mut value);
        *bytes = value.to_string().into_bytes();
    });
}

#[test]
fn damage() {
    let finished = Finished::new();
    let broken = from(&finished);
    let name = "rank-00000-of-00002.safetensors";
    check(&[
        Row::works("as it is", FROM_LAST, &["step 3/3", "run folder: new"], |place| finished.put(place)),
        broken("truncated", FROM_LAST, &[LAST, name, "is truncated: expected", "bytes, found"], truncate),
        broken("too long", FROM_LAST, &[LAST, name, "is too long: expected"], |p| edit(p, FILE, |b| b.push(0))),
        broken("flipped bit", FROM_LAST, &[LAST, name, "damaged", "have checksum", "earlier checkpoint"], flip),
        broken("flipped bit in the header", FROM_LAST, &[LAST, name], |p| edit(p, FILE, |b| b[9] ^= 1)),
        broken("missing file", FROM_LAST, &[LAST, name, "is missing"], |p| remove(p, FILE)),
        broken("missing manifest", FROM_LAST, &[LAST, "not a checkpoint", "manifest.json"], |p| remove(p, MANIFEST)),
        broken("garbage manifest", FROM_LAST, &[MANIFEST, "is not JSON"], |p| p.write(MANIFEST, "\u{1}garbage")),
        broken("empty manifest", FROM_LAST, &[MANIFEST, "is not JSON"], |p| p.write(MANIFEST, "")),
        broken("foreign manifest", FROM_LAST, &[MANIFEST, "not of a checkpoint of zenflow"], |p| {
            p.write(MANIFEST, "{}")
        }),
        broken("manifest of the future", FROM_LAST, &[MANIFEST, "version 2, written by a newer program"], |p| {
            manifest(p, |value| value["version"] = 2.into());
        }),
        broken("edited manifest", FROM_LAST, &[MANIFEST, "is damaged: its blake3 should be"], |p| {
            manifest(p, |value| value["meta"]["step"] = 1.into());
        }),
        broken(
            "a file for a folder",
            "train base.toml --out new --resume base.toml",
            &["base.toml", "checkpoint"],
            |_| {},
        ),
        broken("foreign folder", "train base.toml --out new --resume m", &["m: not a checkpoint"], |place| {
            place.copy(&golden("tiny-llama"), "m");
        }),
        broken(
            "resume of nothing",
            "train base.toml --out new --resume no",
            &["no: expected a checkpoint", "no such folder"],
            |_| {},
        ),
        broken("inspect truncated", "inspect old/checkpoints/step-2", &[name, "is truncated"], truncate),
        broken("inspect flipped", "inspect old/checkpoints/step-2", &[name, "damaged", "checksum"], flip),
        broken("inspect nothing", "inspect no", &["no: expected a checkpoint", "no such folder"], |_| {}),
        broken("inspect a model", "inspect m", &["m: not a checkpoint"], |place| {
            place.copy(&golden("tiny-llama"), "m")
        }),
        broken("export truncated", "export old/checkpoints/step-2 --to new", &[name, "is truncated"], truncate),
        broken("export over a run", "export old/checkpoints/step-2 --to base.toml", &["base.toml"], |_| {}),
        broken(
            "eval flipped",
            "eval old/checkpoints/step-2 --data a.txt --sequence-length 8",
            &[name, "damaged"],
            |place| {
                flip(place);
                place.write("a.txt", "some words to look at");
            },
        ),
    ]);
}

#[test]
fn resuming() {
    let finished = Finished::new();
    let broken = from(&finished);
    let works = |name: &str, command: &str, says: &[&str], damage: fn(&Place)| {
        let finished = &finished;
        Row::works(name, command, says, move |place| {
            finished.put(place);
            damage(place);
        })
    };
    check(&[
        works("automatically, from the newest", AUTO, &["going on after step 2 of 3"], |_| {}),
        works("automatically, past a truncated one", AUTO, &["going on after step 1 of 3"], truncate),
        works("automatically, past a flipped bit", AUTO, &["going on after step 1 of 3"], flip),
        works("automatically, from the start", "train base.toml --out new --resume auto", &["step 1/1"], |_| {}),
        broken("automatically, none whole", AUTO, &["old/checkpoints", "no whole checkpoint"], |p| {
            truncate(p);
            edit(p, "old/checkpoints/step-1/manifest.json", |bytes| bytes.truncate(10));
        }),
        broken(
            "run whose newest is truncated",
            "train base.toml --out new --resume old",
            &[LAST, "is truncated"],
            truncate,
        ),
        broken(
            "run without checkpoints",
            "train base.toml --out new --resume old",
            &["old/checkpoints", "checkpoint"],
            |p| {
                std::fs::remove_dir_all(p.path("old/checkpoints")).expect("checkpoints");
                std::fs::create_dir(p.path("old/checkpoints")).expect("a folder");
            },
        ),
        broken("over a run", "train base.toml --out old", &["old already holds a run", "--resume auto"], |_| {}),
        broken("another seed", FROM_LAST, &["`run.seed` differs", "has 1,", "has 7"], |p| p.run_over("run.seed = 7")),
        broken("another batch", FROM_LAST, &["the batch differs", "4 in micro-batches of 2", "of 1"], |p| {
            p.run_over("run.micro_batch = 1");
        }),
        broken("another model", FROM_LAST, &["the model differs"], |p| {
            p.copy(&golden("tiny-gpt2"), "gpt2");
            p.run_over("model.path = \"gpt2\"");
        }),
        broken("other data", FROM_LAST, &["the data differs"], |p| {
            p.write("other.bin", [1, 0].repeat(999));
            p.run_over("data.path = \"other.bin\"");
        }),
        broken("another length", FROM_LAST, &["the data differs"], |p| p.run_over("data.sequence_length = 16")),
        broken(
            "older than it is",
            "train base.toml -o run.steps=1 --out new --resume old",
            &["step 2", "run.steps"],
            |_| {},
        ),
    ]);
}
