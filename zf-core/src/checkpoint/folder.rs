//! The folder that holds a run's checkpoints: names, order, clean-up.

use std::fs;
use std::path::{Path, PathBuf};

use super::reader::Checkpoint;
use crate::files::{REPLACED, sync_folder};
use crate::{Error, Result};

/// What the hidden name of a checkpoint in the making ends in.
const PARTIAL: &str = ".partial";

/// What the hidden name of a checkpoint being deleted ends in.
const DELETED: &str = ".deleted";

/// The folder of the checkpoint after `step` steps: `ROOT/step-N`.
pub fn step_path(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step}"))
}

/// All checkpoints under `root` by their names, oldest first, whether whole or not; none where `root` is missing.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be read.
pub fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found: Vec<(u64, PathBuf)> = names(root)?
        .into_iter()
        .filter_map(|name| {
            let step = name.strip_prefix("step-")?.parse().ok()?;
            // `step-07` is nobody's name for step 7.
            let path = step_path(root, step);
            (path.file_name()?.to_str()? == name && path.is_dir()).then_some((step, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

/// The newest checkpoint under `root` with a valid manifest and files of the right sizes. Those passed over are named
/// in a warning.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be read.
pub fn newest_whole(root: &Path) -> Result<Option<(u64, PathBuf)>> {
    for (step, path) in list(root)?.into_iter().rev() {
        match Checkpoint::open(&path) {
            Ok(_) => return Ok(Some((step, path))),
            Err(error) => tracing::warn!("passing over a checkpoint that is not whole: {error}"),
        }
    }
    Ok(None)
}

/// Renames checkpoints after `step` to `old-step-N`, where nothing takes or deletes them: a run that goes on from an
/// earlier one must not meet the later ones of its former life. The steps renamed.
///
/// # Errors
/// [`Error::Io`] when a folder cannot be renamed.
pub fn set_aside_after(root: &Path, step: u64) -> Result<Vec<u64>> {
    let mut moved = Vec::new();
    for (later, path) in list(root)?.into_iter().filter(|(s, _)| *s > step) {
        let target = (0..)
            .map(|number: u64| match number {
                0 => root.join(format!("old-step-{later}")),
                _ => root.join(format!("old-step-{later}.{number}")),
            })
            .find(|target| !target.exists())
            .expect("numbers do not run out before folders do");
        fs::rename(&path, &target).map_err(|e| Error::io(&path, e))?;
        moved.push(later);
    }
    if !moved.is_empty() {
        sync_folder(root)?;
    }
    Ok(moved)
}

/// `.step-N.ATTEMPT-K.partial`: `save` is the number of the save within the attempt, so that no two saves share one.
pub(super) fn partial_path(root: &Path, step: u64, attempt: &str, save: u64) -> PathBuf {
    root.join(format!(".step-{step}.{attempt}-{save}{PARTIAL}"))
}

/// Removes what killed runs left: checkpoints in the making, except those of `attempt`, and half-deleted ones. A
/// checkpoint that was being replaced gets its name back.
pub(super) fn clean(root: &Path, attempt: &str) -> Result<()> {
    for name in names(root)? {
        let path = root.join(&name);
        let own = name.contains(&format!(".{attempt}-"));
        if (name.ends_with(PARTIAL) && !own && hidden(&name)) || (name.ends_with(DELETED) && hidden(&name)) {
            fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
        } else if let Some(step) = name.strip_suffix(REPLACED).filter(|_| hidden(&name)) {
            let target = root.join(&step[1..]);
            if target.exists() {
                fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
            } else {
                fs::rename(&path, &target).map_err(|e| Error::io(&path, e))?;
            }
        }
    }
    Ok(())
}

/// Removes failed saves of `attempt` before number `save`.
pub(super) fn remove_failed(root: &Path, attempt: &str, save: u64) {
    let number = |name: &str| -> Option<u64> {
        let (_, rest) = name.strip_suffix(PARTIAL)?.split_once(&format!(".{attempt}-"))?;
        rest.parse().ok()
    };
    for name in names(root).unwrap_or_default() {
        if hidden(&name) && number(&name).is_some_and(|n| n < save) {
            remove(&root.join(name));
        }
    }
}

/// Deletes the oldest checkpoints beyond `keep` (0: keeps all), but never one of `spared`. A folder loses its name
/// first, so that a half-deleted one is never taken for whole. What cannot be deleted is named in a warning: it is no
/// reason to end a run.
pub(super) fn prune(root: &Path, keep: usize, spared: &[u64]) -> Result<()> {
    if keep == 0 {
        return Ok(());
    }
    let all = list(root)?;
    let surplus = all.len().saturating_sub(keep);
    for (step, path) in &all[..surplus] {
        if spared.contains(step) {
            continue;
        }
        let target = root.join(format!(".step-{step}{DELETED}"));
        if target.exists() {
            remove(&target);
        }
        match fs::rename(path, &target) {
            Ok(()) => remove(&target),
            Err(error) => {
                tracing::warn!("cannot delete the old checkpoint {}: {error}", path.display());
            }
        }
    }
    Ok(())
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!("cannot delete {}: {error}", path.display());
    }
}

fn hidden(name: &str) -> bool {
    name.starts_with(".step-")
}

/// Names in `root`, sorted; none where it is missing.
fn names(root: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(root, e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Error::io(root, e))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
