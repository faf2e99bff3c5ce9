//! Making the files: room for them, direct IO where it works, headers.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use zf_core::bytes::ByteSize;
use zf_core::{Error, Result};

use super::cache::Store;
use super::disk::{Disk, read_all, write_all};
use super::folder::Folder;
use super::header;
use super::memory::Memory;
use super::pages::{BLOCK, Shape};

/// Makes a file for each buffer, all zeros behind its header. `notes` gets what a person should know.
pub(super) fn stores(
    disk: &dyn Disk,
    parent: &Path,
    folder: &Folder,
    shapes: &[Shape],
    mut direct: bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Store>> {
    let needed: u64 = shapes.iter().map(Shape::file_bytes).sum();
    // A file system that cannot say so is asked by taking the room.
    if let Some(free) = disk.free(folder.path()).ok().filter(|free| *free < needed) {
        return Err(full(parent, needed, Some(free)));
    }
    let mut block = Memory::new(BLOCK)?;
    let mut stores = Vec::with_capacity(shapes.len());
    let mut reserved = true;
    for (buffer, &shape) in shapes.iter().enumerate() {
        let path = folder.file(buffer);
        let named = |error: io::Error| Error::io(&path, error);
        let mut opened = None;
        if direct {
            match try_direct(disk, &path, &mut block, buffer, &shape)? {
                Ok(file) => opened = Some(file),
                Err(reason) => {
                    direct = false;
                    let parent = parent.display();
                    notes.push(format!(
                        "states lie in {parent} with ordinary IO: direct IO does not work there ({reason})"
                    ));
                }
            }
        }
        let file = match opened {
            Some(file) => file,
            None => {
                let file = disk.create(&path, false).map_err(named)?;
                header::fill(block.bytes()?, buffer, &shape);
                write_all(disk, &file, block.bytes()?, 0).map_err(named)?;
                check(disk, &file, &mut block, buffer, &shape)?.map_err(named)?;
                file
            }
        };
        match disk.allocate(&file, shape.file_bytes()) {
            Ok(()) => {}
            Err(error) if is_full(&error) => return Err(full(parent, needed, disk.free(folder.path()).ok())),
            Err(_) => {
                file.set_len(shape.file_bytes()).map_err(named)?;
                reserved = false;
            }
        }
        stores.push(Store { shape, file: Arc::new(file), path });
    }
    if !reserved {
        notes.push(format!(
            "the file system of {} reserves no room: it may fill up while states are written",
            parent.display()
        ));
    }
    if direct {
        notes.push(format!("states lie in {} with direct IO", parent.display()));
    }
    Ok(stores)
}

/// That the file still begins with its header.
pub(super) fn verify(disk: &dyn Disk, store: &Store, buffer: usize, block: &mut Memory) -> Result<()> {
    check(disk, &store.file, block, buffer, &store.shape)?.map_err(|error| Error::io(&store.path, error))
}

fn check(disk: &dyn Disk, file: &File, block: &mut Memory, buffer: usize, shape: &Shape) -> Result<io::Result<()>> {
    let bytes = block.bytes()?;
    Ok(read_all(disk, file, bytes, 0).and_then(|()| header::check(bytes, buffer, shape)))
}

/// A file for direct IO with its header, if direct IO takes both its writing and its reading; else why not.
fn try_direct(
    disk: &dyn Disk,
    path: &Path,
    block: &mut Memory,
    buffer: usize,
    shape: &Shape,
) -> Result<io::Result<File>> {
    header::fill(block.bytes()?, buffer, shape);
    let file = match disk.create(path, true) {
        Ok(file) => file,
        Err(error) => {
            // Some file systems make the file and refuse the flag.
            let _ = fs::remove_file(path);
            return Ok(Err(error));
        }
    };
    let written = write_all(disk, &file, block.bytes()?, 0);
    let tried = match written {
        Ok(()) => check(disk, &file, block, buffer, shape)?,
        error => error,
    };
    Ok(match tried {
        Ok(()) => Ok(file),
        Err(error) => fs::remove_file(path).and(Err(error)),
    })
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn full(parent: &Path, needed: u64, free: Option<u64>) -> Error {
    let free = free.map_or_else(|| "not so much is free".to_owned(), |free| format!("{} are free", size(free)));
    let text = format!("the states need {}, and {free}; free some space, or keep states elsewhere", size(needed));
    Error::io(parent, io::Error::new(io::ErrorKind::StorageFull, text))
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => ByteSize(bytes).to_string(),
        _ => format!("{:.1}MB ({bytes} bytes)", bytes as f64 / 1e6),
    }
}
