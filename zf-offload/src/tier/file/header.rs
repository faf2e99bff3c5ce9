//! The first block of a file: what it holds, so that a file that is not ours is noticed.

use std::io;

use super::pages::{BLOCK, Shape};

const MAGIC: &[u8; 8] = b"ZFSTATES";
const VERSION: u64 = 1;
const NAMES: [&str; 5] = ["version", "buffer", "elements", "arrays", "elements per page"];

/// Writes the header of a buffer into `block`, little-endian: the magic, then the version, the buffer's index and its
/// shape, 8 bytes each.
pub(super) fn fill(block: &mut [u8], buffer: usize, shape: &Shape) {
    block[..BLOCK].fill(0);
    block[..8].copy_from_slice(MAGIC);
    for (place, value) in block[8..].chunks_exact_mut(8).zip(fields(buffer, shape)) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

/// That `block` is the header of this buffer.
///
/// # Errors
/// What differs.
pub(super) fn check(block: &[u8], buffer: usize, shape: &Shape) -> io::Result<()> {
    let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    if &block[..8] != MAGIC {
        return wrong("the file does not begin with ZFSTATES: something else wrote to it".into());
    }
    let found = block[8..].chunks_exact(8).map(|place| u64::from_le_bytes(place.try_into().expect("8 bytes")));
    for ((name, expected), found) in NAMES.iter().zip(fields(buffer, shape)).zip(found) {
        if expected != found {
            return wrong(format!("header: expected {name} {expected}, found {found}: something else wrote to it"));
        }
    }
    Ok(())
}

fn fields(buffer: usize, shape: &Shape) -> [u64; 5] {
    [VERSION, buffer as u64, shape.len as u64, shape.arrays as u64, shape.page as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_that_of_its_buffer_alone() {
        let shape = Shape::new(100, 3, 10);
        let mut block = vec![7; BLOCK];
        fill(&mut block, 2, &shape);
        check(&block, 2, &shape).unwrap();
        assert_eq!(block[48..], [0; BLOCK - 48]);
        let text = |buffer, shape| check(&block, buffer, shape).unwrap_err().to_string();
        assert!(text(3, &shape).contains("expected buffer 3, found 2"));
        assert!(text(2, &Shape::new(101, 3, 10)).contains("expected elements 101, found 100"));
        assert!(check(&[0; BLOCK], 2, &shape).unwrap_err().to_string().contains("ZFSTATES"));
    }
}
