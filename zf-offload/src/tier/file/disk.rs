//! Reading and writing, whole pieces at a time, through a seam at which tests make things go wrong.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::pages::BLOCK;

/// What the system offers.
pub(super) trait Disk: Send + Sync {
    /// Makes a new file, for direct IO if asked.
    fn create(&self, path: &Path, direct: bool) -> io::Result<File>;

    /// Bytes free for this user where `folder` lies.
    fn free(&self, folder: &Path) -> io::Result<u64>;

    /// Takes so many bytes of the drive, which read as zeros.
    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Reads at most all of `into`.
    fn read_at(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes at most all of `from`.
    fn write_at(&self, file: &File, from: &[u8], offset: u64) -> io::Result<usize>;
}

/// The system itself.
#[derive(Debug)]
pub(super) struct System;

impl Disk for System {
    fn create(&self, path: &Path, direct: bool) -> io::Result<File> {
        let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
        OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(path)
    }

    fn free(&self, folder: &Path) -> io::Result<u64> {
        let stats = rustix::fs::statvfs(folder)?;
        Ok(stats.f_bavail.saturating_mul(stats.f_frsize))
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        loop {
            match fallocate(file, FallocateFlags::empty(), 0, bytes) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    fn read_at(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(into, offset)
    }

    fn write_at(&self, file: &File, from: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(from, offset)
    }
}

/// Reads all of `into`.
///
/// # Errors
/// What the system says, with the offset; a file that ends before.
pub(super) fn read_all(disk: &dyn Disk, file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    whole("reading", into.len(), offset, |done, at| disk.read_at(file, &mut into[done..], at))
}

/// Writes all of `from`.
///
/// # Errors
/// What the system says, with the offset.
pub(super) fn write_all(disk: &dyn Disk, file: &File, from: &[u8], offset: u64) -> io::Result<()> {
    whole("writing", from.len(), offset, |done, at| disk.write_at(file, &from[done..], at))
}

/// How often a call may be interrupted or bring less than a block.
const TRIES: u32 = 100;

/// Repeats `some` until `bytes` bytes are through. What begins within a block is done again from the block's beginning,
/// since direct IO takes nothing else.
fn whole(
    what: &str,
    bytes: usize,
    offset: u64,
    mut some: impl FnMut(usize, u64) -> io::Result<usize>,
) -> io::Result<()> {
    let (mut done, mut tries) = (0, 0);
    while done < bytes {
        let at = offset + done as u64;
        let error = match some(done, at) {
            Ok(0) => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "nothing more came through; did something else cut the file?",
            ),
            Ok(count) if done + count >= bytes => return Ok(()),
            Ok(count) if count >= BLOCK => {
                done = (done + count) / BLOCK * BLOCK;
                tries = 0;
                continue;
            }
            Ok(_) if tries < TRIES => {
                tries += 1;
                continue;
            }
            Ok(count) => io::Error::other(format!("only {count} bytes came through, {TRIES} times")),
            Err(error) if error.kind() == io::ErrorKind::Interrupted && tries < TRIES => {
                tries += 1;
                continue;
            }
            Err(error) => error,
        };
        let advice = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free some space, or keep states elsewhere",
            io::ErrorKind::UnexpectedEof => "",
            _ => "; look for errors of the drive in the system's log, or keep states elsewhere",
        };
        let text = format!("{what} {} bytes at offset {at}: {error}{advice}", bytes - done);
        return Err(io::Error::new(error.kind(), text));
    }
    Ok(())
}
