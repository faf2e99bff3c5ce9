//! A folder of one's own, and what dead runs left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};
use zf_core::{Error, Result};

const PREFIX: &str = "states-";
const LOCK: &str = "lock";
const FILE: &str = "buffer-";

/// Distinguishes the folders of one process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A fresh folder `states-PROCESS-NUMBER`, removed with its files when dropped. While it is in use, a lock on a file in it
/// says so.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// A folder in `parent`, which is made where there is none.
    pub(super) fn create(parent: &Path) -> Result<Self> {
        fs::create_dir_all(parent).map_err(|error| Error::io(parent, error))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        // The folder gets its name once it is locked, so that nobody takes it for a leftover.
        let (hidden, path) = (parent.join(format!(".{name}")), parent.join(&name));
        let make = || {
            fs::create_dir(&hidden)?;
            let lock = File::create(hidden.join(LOCK))?;
            // A file system without locks has no leftovers removed either.
            let _ = flock(&lock, FlockOperation::NonBlockingLockExclusive);
            fs::rename(&hidden, &path)?;
            Ok(lock)
        };
        let lock = make().map_err(|error: io::Error| Error::io(&path, error))?;
        Ok(Self { path, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file of a buffer.
    pub(super) fn file(&self, buffer: usize) -> PathBuf {
        self.path.join(format!("{FILE}{buffer}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Dropping cannot report; what stays is removed by the next run.
        let _ = remove(&self.path);
    }
}

/// Removes folders in `parent` whose runs are dead; the number removed. Files that are not ours are left alone.
pub(super) fn remove_stale(parent: &Path) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(parent).map_err(|error| Error::io(parent, error))? {
        let entry = entry.map_err(|error| Error::io(parent, error))?;
        if !is_ours(&entry.file_name().to_string_lossy()) {
            continue;
        }
        // Another run may remove it at the same time.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() && remove(&entry.path()).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

/// `states-PROCESS-NUMBER`.
fn is_ours(name: &str) -> bool {
    let tag = name.strip_prefix(PREFIX).and_then(|tag| tag.split_once('-'));
    tag.is_some_and(|(a, b)| [a, b].iter().all(|part| is_number(part)))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes what a [`Folder`] holds, the lock last, and the folder if nothing else is in it.
fn remove(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().strip_prefix(FILE).is_some_and(is_number) {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_file(path.join(LOCK))?;
    fs::remove_dir(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_go_and_living_runs_stay() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        for name in ["states-1-0", "states-2-0", "states-2-x", "other-1-0"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("lock"), "").unwrap();
            fs::write(at(name).join("buffer-0"), "left").unwrap();
        }
        fs::write(at("states-2-0").join("notes.txt"), "a person's").unwrap();
        let living = Folder::create(parent.path()).unwrap();
        fs::write(living.file(0), "in use").unwrap();
        assert_eq!(remove_stale(parent.path()).unwrap(), 1);
        assert!(!at("states-1-0").exists());
        assert!(at("states-2-0").join("notes.txt").exists() && !at("states-2-0").join("buffer-0").exists());
        assert!(at("states-2-x").join("buffer-0").exists() && at("other-1-0").join("buffer-0").exists());
        let path = living.path().to_owned();
        assert!(living.file(0).exists());
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn folders_of_one_process_differ() {
        let parent = tempfile::tempdir().unwrap();
        let [a, b] = [0, 1].map(|_| Folder::create(&parent.path().join("made")).unwrap());
        assert_ne!(a.path(), b.path());
    }
}
