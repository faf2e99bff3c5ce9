//! Files that are either whole or not there: a temporary name in the same folder, sync, rename, sync of the folder.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// What every temporary name ends in.
pub const TEMPORARY: &str = ".tmp";

/// Bytes buffered between the caller and the file.
const BUFFER: usize = 1 << 20;

/// Distinguishes temporary names of one process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Writes `bytes` to `path`: afterwards the file holds all of them, and at no moment a part.
///
/// # Errors
/// [`Error::Io`] naming `path`; nothing is left behind.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|e| Error::io(path, e))?;
    file.commit()
}

/// A file that appears under its name only with [`AtomicFile::commit`]; dropped before, it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    writer: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Opens a temporary file beside `path`, in a folder that exists.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path`.
    pub fn create(path: &Path) -> Result<Self> {
        let mut name: OsString =
            path.file_name().ok_or_else(|| Error::io(path, io::Error::other("the path names no file")))?.into();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        name.push(format!(".{}-{number}{TEMPORARY}", std::process::id()));
        let temporary = path.with_file_name(name);
        let file = File::create(&temporary).map_err(|e| Error::io(path, e))?;
        Ok(Self { target: path.to_path_buf(), temporary, writer: Some(BufWriter::with_capacity(BUFFER, file)) })
    }

    /// Flushes, syncs and gives the file its name, replacing what had it, then syncs the folder.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path; nothing is left behind.
    pub fn commit(mut self) -> Result<()> {
        let writer = self.writer.take().expect("only commit takes the writer");
        let result = writer
            .into_inner()
            .map_err(io::IntoInnerError::into_error)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&self.temporary, &self.target));
        if let Err(error) = result {
            // The first error is the one to report; a leftover falls to `remove_stale`.
            let _ = fs::remove_file(&self.temporary);
            return Err(Error::io(&self.target, error));
        }
        sync_folder(parent(&self.target))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Some(writer) => writer.write(bytes),
            None => Err(io::Error::other("the file is committed")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.writer.take().is_some() {
            // Dropping cannot report; a leftover falls to `remove_stale`.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Renames a folder whose files are synced, so that the new name survives a power cut: syncs the folder itself,
/// renames, syncs the parents. A folder that already has the new name is replaced as a whole.
///
/// # Errors
/// [`Error::Io`] naming the folder.
pub fn rename_dir_synced(from: &Path, to: &Path) -> Result<()> {
    sync_folder(from)?;
    if to.exists() {
        replace_dir(from, to)?;
    } else {
        fs::rename(from, to).map_err(|e| Error::io(to, e))?;
    }
    sync_folder(parent(to))?;
    if parent(from) != parent(to) {
        sync_folder(parent(from))?;
    }
    Ok(())
}

/// Removes temporary files that a killed process left in `folder`; the number removed. Only for a folder in which
/// nobody is writing.
///
/// # Errors
/// [`Error::Io`] naming the file that could not be removed.
pub fn remove_stale(folder: &Path) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let name = entry.file_name();
        if is_temporary(&name.to_string_lossy()) && entry.path().is_file() {
            fs::remove_file(entry.path()).map_err(|e| Error::io(entry.path(), e))?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Makes names in `folder` durable.
///
/// # Errors
/// [`Error::Io`] naming the folder.
pub fn sync_folder(folder: &Path) -> Result<()> {
    match File::open(folder).and_then(|file| file.sync_all()) {
        // Some network file systems refuse to sync folders; they make names durable with the rename.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        result => result.map_err(|e| Error::io(folder, e)),
    }
}

/// Bytes that a user may still write on the file system of `folder`.
///
/// # Errors
/// [`Error::Io`] naming the folder.
pub fn free_space(folder: &Path) -> Result<u64> {
    let stats = rustix::fs::statvfs(folder).map_err(|e| Error::io(folder, e.into()))?;
    Ok(stats.f_bavail.saturating_mul(stats.f_frsize))
}

/// `name.PROCESS-NUMBER.tmp`, as [`AtomicFile`] makes it, and nothing else that happens to end in `.tmp`.
fn is_temporary(name: &str) -> bool {
    name.strip_suffix(TEMPORARY)
        .and_then(|rest| rest.rsplit_once('.'))
        .and_then(|(_, tag)| tag.split_once('-'))
        .is_some_and(|(a, b)| [a, b].iter().all(|part| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit())))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Puts `from` in the place of the existing folder `to`. Exchanging the names leaves no moment without a whole folder;
/// where the file system cannot, the old one moves away first.
fn replace_dir(from: &Path, to: &Path) -> Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE).is_ok() {
            return fs::remove_dir_all(from).map_err(|e| Error::io(from, e));
        }
    }
    let mut name: OsString = to.file_name().unwrap_or_default().into();
    name.push(REPLACED);
    let mut hidden = OsString::from(".");
    hidden.push(name);
    let aside = to.with_file_name(hidden);
    fs::rename(to, &aside).map_err(|e| Error::io(to, e))?;
    fs::rename(from, to).map_err(|e| Error::io(to, e))?;
    fs::remove_dir_all(&aside).map_err(|e| Error::io(&aside, e))
}

/// What the name of a folder being replaced ends in (it begins with a dot), where names cannot be exchanged.
pub(crate) const REPLACED: &str = ".replaced";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_replaces_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let mut half = AtomicFile::create(&path).unwrap();
        half.write_all(b"three").unwrap();
        drop(half);
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_own_temporary_names_are_stale() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.json.12-0.tmp", "notes.tmp", "b.x-1.tmp", "a.json"] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(remove_stale(folder.path()).unwrap(), 1);
        assert!(!folder.path().join("a.json.12-0.tmp").exists());
        assert!(folder.path().join("notes.tmp").exists());
    }

    #[test]
    fn a_folder_replaces_another_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        fs::create_dir(&new).unwrap();
        fs::write(new.join("x"), b"new").unwrap();
        fs::create_dir(&old).unwrap();
        fs::write(old.join("y"), b"old").unwrap();
        rename_dir_synced(&new, &old).unwrap();
        assert_eq!(fs::read(old.join("x")).unwrap(), b"new");
        assert!(!old.join("y").exists() && !new.exists());
    }

    #[test]
    fn an_error_names_the_path_meant() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/a.json");
        let message = write_atomic(&path, b"").unwrap_err().to_string();
        assert!(message.contains("missing/a.json: "), "{message}");
    }
}
