//! `zf inspect`: what a checkpoint holds, and whether it is whole.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, Table, presets};
use zf_core::checkpoint::{Checkpoint, MANIFEST, StateHasher, list};
use zf_core::{Error, Result};

use super::size::bytes;

/// Prints what the checkpoint at `path` (or the newest one of a run folder) holds, and checks all of it.
///
/// # Errors
/// What is wrong with it, naming the file; a folder that has no checkpoint.
pub fn run(path: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(&find(path)?)?;
    write_run(&checkpoint, out)?;
    write_tensors(&checkpoint, out)?;
    out.flush()?;
    checkpoint.verify()?;
    let (found, expected) = (checkpoint.state_hash()?, &checkpoint.meta().state_hash);
    if found != *expected {
        return Err(Error::Input(format!(
            "{}: the checksums match, but the state hash is {found}, expected {expected}: written by a faulty program",
            checkpoint.path().display()
        ))
        .into());
    }
    writeln!(out, "\nwhole: {} pieces match their checksums, and the state its hash", checkpoint.entries().len())?;
    Ok(())
}

/// A checkpoint itself, or the newest of a run folder or of its folder of checkpoints. Whether it is whole is for the
/// caller to say, so the newest is taken even if it is not.
fn find(path: &Path) -> Result<PathBuf> {
    if path.join(MANIFEST).exists() {
        return Ok(path.to_path_buf());
    }
    if path.is_file() {
        return Err(Error::Input(format!("{}: a file; expected a checkpoint or a run folder", path.display())));
    }
    for root in [path.join("checkpoints"), path.to_path_buf()] {
        if let Some((_, newest)) = list(&root)?.pop() {
            return Ok(newest);
        }
    }
    if path.join("checkpoints").is_dir() {
        return Err(Error::Input(format!("{}: the run has no checkpoint yet", path.display())));
    }
    // Opening it says what is missing.
    Ok(path.to_path_buf())
}

fn write_run(checkpoint: &Checkpoint, out: &mut dyn Write) -> anyhow::Result<()> {
    let meta = checkpoint.meta();
    let total: u64 = checkpoint.files().iter().map(|file| file.bytes).sum();
    let mut rows = vec![
        ("checkpoint", checkpoint.path().display().to_string()),
        ("step", format!("{} ({} updates)", meta.step, meta.updates)),
        ("sequences seen", meta.data_position.to_string()),
        ("seed", meta.seed.to_string()),
        ("model", meta.model_identity.clone()),
        ("data", meta.data_identity.clone()),
        ("files", format!("{} of {}, {} in all", checkpoint.files().len(), checkpoint.world(), bytes(total))),
        ("state hash", meta.state_hash.clone()),
    ];
    if let Some(best) = meta.best {
        rows.push(("best validation", format!("{} after step {}", best.validation_loss, best.step)));
    }
    if let Some(open) = zf_core::train::open_window(meta) {
        rows.push(("update window", open));
    }
    if !meta.loss_scale.is_null() {
        rows.push(("loss scale", meta.loss_scale.to_string()));
    }
    for (name, version) in &meta.versions {
        rows.push(("written by", format!("{name} {version}")));
    }
    for (what, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
        writeln!(out, "{what:<16} {value}")?;
    }
    Ok(())
}

/// One row a parameter, and the sums of each kind.
fn write_tensors(checkpoint: &Checkpoint, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut rows: Vec<(&str, &[i64], Vec<String>)> = Vec::new();
    let mut sums: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for info in checkpoint.tensors() {
        let held = format!("{} {}", info.kind, info.dtype.name());
        match rows.last_mut() {
            Some((name, shape, kinds)) if *name == info.name && *shape == info.shape => kinds.push(held),
            _ => rows.push((info.name, info.shape, vec![held])),
        }
        let sum = sums.entry(info.kind).or_default();
        sum.0 += info.numel;
        sum.1 += (info.numel * info.dtype.size()) as u64;
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["parameter", "shape", "held", "updates"]);
    for (name, shape, kinds) in rows {
        let updates = checkpoint.meta().counts.get(name).map_or("-".into(), u64::to_string);
        table.add_row([name.to_owned(), format!("{shape:?}"), kinds.join(", "), updates]);
    }
    writeln!(out, "\n{table}\n")?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["kind", "elements", "bytes", "in the state hash"]);
    for (kind, (numel, size)) in sums {
        let hashed = if StateHasher::includes(kind) { "yes" } else { "no" };
        table.add_row([kind.to_owned(), numel.to_string(), bytes(size), hashed.to_owned()]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use zf_core::checkpoint::{MASTER, Meta, Options, Piece, RankState, Writer, step_path};

    use super::*;

    fn saved(run: &Path) {
        let mut writer = Writer::new(&run.join("checkpoints"), 0, Options::default()).unwrap();
        for step in [3, 12] {
            let pieces = vec![
                Piece::f32("w", MASTER, &[2], 0..2, &[1.0, 2.0]),
                Piece::f32("w", "exp_avg", &[2], 0..2, &[0.0, 0.5]),
            ];
            let meta = Meta { step, counts: [("w".to_owned(), step)].into(), ..Meta::default() };
            writer.save(RankState { step, rank: 0, world: 1, pieces }, Some(meta)).unwrap();
        }
    }

    #[test]
    fn shows_the_newest_of_a_run() {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path());
        let checkpoints = folder.path().join("checkpoints");
        for path in [folder.path(), checkpoints.as_path(), &step_path(&checkpoints, 12)] {
            let mut out = Vec::new();
            run(path, &mut out).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert!(text.contains("step             12 (0 updates)"), "{text}");
            assert!(text.contains("exp_avg F32, master F32"), "{text}");
            assert!(text.contains("whole: 2 pieces"), "{text}");
        }
    }

    #[test]
    fn says_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path());
        let file = step_path(&folder.path().join("checkpoints"), 12).join("rank-00000-of-00001.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let check = |path: &Path, expected: &str| {
            let error = run(path, &mut Vec::new()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.downcast_ref::<Error>().unwrap().exit_code(), 2);
        };
        check(folder.path(), "`w` (exp_avg) have checksum");
        check(&folder.path().join("none"), "no such folder");
        let empty = folder.path().join("empty");
        std::fs::create_dir_all(empty.join("checkpoints")).unwrap();
        check(&empty, "the run has no checkpoint yet");
    }
}
