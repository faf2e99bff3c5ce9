//! Reading a `.txt` file in pieces that are whole characters and, for large files, whole lines.

use std::io::Read;
use std::path::Path;

use zf_core::Result;

use super::source::input;

/// Bytes of a piece. The tokenizers crate needs some 100 bytes for each token while it works.
const PIECE: usize = 1 << 20;

/// Calls `each` with the text of `reader`, piece by piece. A byte order mark at the beginning is left out.
///
/// With `lines` a piece ends after a line break that is followed by something else than white space: tokenizers of the
/// GPT-2 and Llama 3 kind never join what lies on both sides of such a place, so the pieces give the tokens of the
/// whole. Without, it ends at any character.
pub(super) fn pieces(
    mut reader: impl Read,
    path: &Path,
    lines: bool,
    each: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut buffer = Vec::with_capacity(2 * PIECE);
    let (mut offset, mut line) = (0_u64, 1_u64);
    loop {
        let read = (&mut reader).take(PIECE as u64).read_to_end(&mut buffer).map_err(|e| input(path, e))?;
        let end = read < PIECE;
        let valid = match std::str::from_utf8(&buffer) {
            Ok(text) => text.len(),
            // A character cut by the end of the buffer is completed by the next read.
            Err(e) if e.error_len().is_none() && !end => e.valid_up_to(),
            Err(e) => {
                let at = e.valid_up_to();
                return Err(input(
                    path,
                    format!(
                        "line {}: broken UTF-8 at byte {}; convert the file to UTF-8 first",
                        line + breaks(&buffer[..at]),
                        offset + at as u64
                    ),
                ));
            }
        };
        let text = std::str::from_utf8(&buffer[..valid]).expect("checked just above");
        let cut = if end || !lines { valid } else { last_line_start(text).unwrap_or(0) };
        let piece = &text[..cut];
        let shown = if offset == 0 { piece.strip_prefix('\u{feff}').unwrap_or(piece) } else { piece };
        if !shown.is_empty() {
            each(shown)?;
        }
        offset += cut as u64;
        line += breaks(&buffer[..cut]);
        buffer.drain(..cut);
        if end {
            return Ok(());
        }
    }
}

/// The last place after a line break that no white space follows.
fn last_line_start(text: &str) -> Option<usize> {
    let mut before = text.len();
    while let Some(at) = text[..before].rfind('\n') {
        let next = text[at + 1..].chars().next();
        if next.is_some_and(|c| !c.is_whitespace()) {
            return Some(at + 1);
        }
        before = at;
    }
    None
}

fn breaks(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&b| b == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], lines: bool) -> Result<Vec<String>> {
        let mut got = Vec::new();
        pieces(bytes, Path::new("a.txt"), lines, &mut |piece| {
            got.push(piece.to_owned());
            Ok(())
        })?;
        Ok(got)
    }

    #[test]
    fn pieces_join_to_the_whole() {
        let text = "Ünïcödé wörds\n\n  and lines ☃\nmore\n".repeat(60_000);
        for lines in [false, true] {
            let got = read(text.as_bytes(), lines).unwrap();
            assert!(got.len() > 1);
            assert!(got.concat() == text);
            if lines {
                for pair in got.windows(2) {
                    assert!(pair[0].ends_with('\n'));
                    assert!(!pair[1].starts_with(char::is_whitespace));
                }
            }
        }
    }

    #[test]
    fn text_without_line_breaks_is_one_piece() {
        let text = "x".repeat(5 * PIECE / 2);
        assert_eq!(read(text.as_bytes(), true).unwrap().len(), 1);
    }

    #[test]
    fn a_byte_order_mark_is_left_out() {
        assert_eq!(read("\u{feff}a\u{feff}".as_bytes(), true).unwrap(), ["a\u{feff}"]);
        assert!(read("\u{feff}".as_bytes(), true).unwrap().is_empty());
    }

    #[test]
    fn broken_bytes_are_located() {
        let far = [b"ab\n".repeat(PIECE / 2), b"\xff".to_vec()].concat();
        let place = format!("line {}: broken UTF-8 at byte {}", PIECE / 2 + 1, PIECE / 2 * 3);
        for (bytes, expected) in [
            (&b"ok\nno \xff\n"[..], "a.txt: line 2: broken UTF-8 at byte 6"),
            (&b"cut \xe2\x98"[..], "line 1: broken UTF-8 at byte 4"),
            (&far[..], place.as_str()),
        ] {
            let error = read(bytes, true).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
