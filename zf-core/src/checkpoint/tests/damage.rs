//! Every kind of damage has its own message.

use std::fs;

use super::*;
use crate::Error;

const FILE: &str = "rank-00001-of-00002.safetensors";

/// Damages a checkpoint of two ranks and checks what opening and verifying it says.
fn check(damage: impl FnOnce(&Path), expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    save_model(folder.path(), 2, 4);
    let path = step_path(folder.path(), 4);
    Checkpoint::open(&path).unwrap().verify().unwrap();
    damage(&path);
    let error = Checkpoint::open(&path).and_then(|c| c.verify()).unwrap_err();
    let message = error.to_string();
    for part in expected {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
    assert!(message.contains("step-4"), "{message}");
    assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
    assert_eq!(error.exit_code(), 2, "{message}");
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Changes the manifest and seals it again, as a faulty writer would.
fn reseal(path: &Path, change: impl FnOnce(&mut manifest::Manifest)) {
    let path = path.join(MANIFEST);
    let mut manifest = manifest::Manifest::from_text(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(&path, manifest.to_text().unwrap()).unwrap();
}

#[test]
fn truncated_file() {
    check(
        |path| edit(&path.join(FILE), |bytes| bytes.truncate(100)),
        &[FILE, "truncated: expected", "bytes, found 100"],
    );
    check(|path| edit(&path.join(FILE), Vec::clear), &["found 0"]);
    check(|path| edit(&path.join(FILE), |bytes| bytes.push(0)), &["too long"]);
}

#[test]
fn missing_file() {
    check(|path| fs::remove_file(path.join(FILE)).unwrap(), &[FILE, "is missing"]);
}

#[test]
fn flipped_bit_in_a_tensor() {
    // The last bytes of the file belong to the frozen parameter, those before to other tensors.
    check(
        |path| edit(&path.join(FILE), |bytes| *bytes.last_mut().unwrap() ^= 1),
        &[FILE, "`frozen` (parameter)", "elements 1..3", "checksum", "expected"],
    );
}

#[test]
fn damaged_header() {
    check(|path| edit(&path.join(FILE), |bytes| bytes[8] = b'x'), &[FILE, "damaged safetensors header"]);
    check(|path| edit(&path.join(FILE), |bytes| bytes[7] = 1), &[FILE, "damaged safetensors header: length"]);
}

#[test]
fn foreign_folder() {
    check(|path| fs::remove_file(path.join(MANIFEST)).unwrap(), &["not a checkpoint: it has no manifest.json"]);
    check(|path| fs::remove_dir_all(path).unwrap(), &["no such folder"]);
    check(
        |path| fs::write(path.join(MANIFEST), r#"{"weight_map": {}}"#).unwrap(),
        &["manifest.json", "not of a checkpoint of zenflow", "found none"],
    );
}

#[test]
fn manifest_that_is_not_json() {
    check(|path| edit(&path.join(MANIFEST), |bytes| bytes.truncate(300)), &["manifest.json", "is not JSON", "line"]);
    check(|path| edit(&path.join(MANIFEST), Vec::clear), &["is not JSON"]);
}

#[test]
fn changed_manifest() {
    let change = |bytes: &mut Vec<u8>| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        *bytes = text.replace("\"w\": 4", "\"w\": 5").into_bytes();
    };
    check(|path| edit(&path.join(MANIFEST), change), &["manifest.json", "is damaged: its blake3 should be"]);
}

#[test]
fn newer_format() {
    check(
        |path| reseal(path, |manifest| manifest.version = 9),
        &["format version 9", "newer program", "reads up to 1"],
    );
}

#[test]
fn uncovered_and_doubled_ranges() {
    check(
        |path| reseal(path, |manifest| manifest.entries.retain(|e| e.file != FILE || e.kind != "exp_avg")),
        &["damaged checkpoint", "`w` (exp_avg)", "elements 17..35 of 35 are in no file"],
    );
    check(
        |path| {
            reseal(path, |manifest| {
                let second = manifest.entries.iter_mut().find(|e| e.file == FILE && e.kind == "exp_avg").unwrap();
                second.start -= 2;
            })
        },
        &["`w` (exp_avg)", "elements 15..17 are in two files"],
    );
}

#[test]
fn entries_that_disagree_with_the_files() {
    check(|path| reseal(path, |manifest| manifest.entries[0].key = "master:v".into()), &["has no tensor `master:v`"]);
    check(
        |path| reseal(path, |manifest| manifest.files.truncate(1)),
        &["lies in rank-00001-of-00002.safetensors, which the manifest does not list"],
    );
    check(
        |path| reseal(path, |manifest| manifest.files[0].file = "../../secret".into()),
        &["`../../secret` is no file name"],
    );
    check(
        |path| reseal(path, |manifest| manifest.entries[0].offset[0] = 1),
        &["`w` (master): a box at [1, 0]", "this version reads only"],
    );
    // A file of the same size from another checkpoint, with its tensors in another order.
    check(
        |path| {
            edit(&path.join(FILE), |bytes| {
                let text = String::from_utf8_lossy(bytes).find("master:norm").unwrap();
                bytes[text + 7] = b'N';
            });
        },
        &["has no tensor `master:norm"],
    );
}

#[test]
fn unknown_fields_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    save_model(folder.path(), 1, 4);
    let path = step_path(folder.path(), 4);
    let text = fs::read(path.join(MANIFEST)).unwrap();
    let mut value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    value["later"] = serde_json::json!(1);
    value["meta"]["later"] = serde_json::json!({"x": 1});
    value["blake3"] = serde_json::json!("");
    let seal = blake3::hash(value.to_string().as_bytes()).to_hex().to_string();
    value["blake3"] = serde_json::json!(seal);
    fs::write(path.join(MANIFEST), value.to_string()).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().meta().counts["w"], 4);
}

#[test]
fn questions_it_cannot_answer() {
    let folder = tempfile::tempdir().unwrap();
    save_model(folder.path(), 1, 4);
    let checkpoint = Checkpoint::open(&step_path(folder.path(), 4)).unwrap();
    let ask = |name: &str, kind: &str, range: std::ops::Range<usize>| {
        let mut out = vec![0.0; range.len()];
        checkpoint.read_f32(name, kind, range, &mut out).unwrap_err().to_string()
    };
    assert!(ask("v", MASTER, 0..1).contains("no parameter `v`"));
    assert!(ask("w", "momentum", 0..1).contains("no momentum of `w`, only exp_avg, master"));
    assert!(ask("w", MASTER, 30..36).contains("has 35 elements, asked for 30..36"));
    assert!(matches!(checkpoint.read_f32("w", MASTER, 0..2, &mut [0.0]), Err(Error::Engine(_))));
    assert!(checkpoint.read_tensor_f32("v").is_err());
}
