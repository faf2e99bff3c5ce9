//! Files against memory, and against drives that misbehave.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use zf_core::Error;
use zf_core::stage::{Span, Tier};

use super::disk::{Disk, System};
use super::pages::BLOCK;
use super::{FileSettings, FileTier};
use crate::tier::MemoryTier;

const LENS: [usize; 4] = [5000, 0, 1, 3072];

/// A drive on which things go wrong by count of calls.
#[derive(Debug, Default)]
struct Faulty {
    calls: AtomicU64,
    /// Every call is interrupted or brings only a part.
    short: bool,
    /// From this call on, reads or writes fail with this code.
    fail: Option<(u64, i32)>,
    /// No direct IO.
    ordinary: bool,
    /// Room is not taken, as on file systems that cannot.
    sparse: bool,
    free: Option<u64>,
}

impl Faulty {
    /// How many bytes the next call may carry.
    fn next(&self, bytes: usize) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some((_, code)) = self.fail.filter(|(from, _)| call >= *from) {
            return Err(io::Error::from_raw_os_error(code));
        }
        match call % 4 {
            _ if !self.short => Ok(bytes),
            0 => Err(io::ErrorKind::Interrupted.into()),
            // Less than a block, and with more a part of one.
            1 => Ok(bytes.min(100)),
            2 => Ok(bytes.min(BLOCK + 77)),
            _ => Ok(bytes),
        }
    }
}

impl Disk for Faulty {
    fn create(&self, path: &Path, direct: bool) -> io::Result<File> {
        if direct && self.ordinary {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // Short counts leave direct IO at addresses that the system refuses.
        System.create(path, direct && !self.short)
    }

    fn free(&self, folder: &Path) -> io::Result<u64> {
        self.free.map_or_else(|| System.free(folder), Ok)
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        if self.sparse {
            return Err(io::ErrorKind::Unsupported.into());
        }
        System.allocate(file, bytes)
    }

    fn read_at(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let bytes = self.next(into.len())?;
        System.read_at(file, &mut into[..bytes], offset)
    }

    fn write_at(&self, file: &File, from: &[u8], offset: u64) -> io::Result<usize> {
        let bytes = self.next(from.len())?;
        System.write_at(file, &from[..bytes], offset)
    }
}

fn settings(largest_span: usize) -> FileSettings {
    FileSettings { largest_span, ..FileSettings::default() }
}

fn span(buffer: usize, range: std::ops::Range<usize>) -> Span {
    Span { buffer, range }
}

/// Changes a span in a way that depends on what was there; what the arrays hold afterwards.
fn change(tier: &mut dyn Tier, span: &Span, salt: f32) -> Vec<Vec<f32>> {
    let mut seen = Vec::new();
    let result = tier.with(span, &mut |arrays| {
        for (index, array) in arrays.iter_mut().enumerate() {
            for (place, value) in array.iter_mut().enumerate() {
                *value = *value * 0.5 + salt + (index * 10_000 + place) as f32;
            }
        }
        seen = arrays.iter().map(|array| array.to_vec()).collect();
        Ok(())
    });
    result.unwrap();
    seen
}

#[derive(Debug, Clone)]
enum Act {
    Announce(Vec<Span>),
    With(Span),
    Flush,
}

fn spans() -> impl Strategy<Value = Span> {
    (0..LENS.len()).prop_flat_map(|buffer| {
        let len = LENS[buffer];
        (0..=len, 0..=1500usize).prop_map(move |(start, count)| span(buffer, start..(start + count).min(len)))
    })
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        2 => prop::collection::vec(spans(), 0..8).prop_map(Act::Announce),
        6 => spans().prop_map(Act::With),
        1 => Just(Act::Flush),
    ];
    prop::collection::vec(act, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn files_hold_the_same_bits_as_memory(acts in acts(), short in any::<bool>(), small in any::<bool>(), threads in 1..4usize) {
        let folder = tempfile::tempdir().unwrap();
        // The smallest pool that is allowed, or the usual one.
        let pool = small.then_some(4 * 2 * 2048 * 4);
        let settings = FileSettings { largest_span: 1500, pool, threads, ..FileSettings::default() };
        let disk = Arc::new(Faulty { short, ..Faulty::default() });
        let mut files = FileTier::on(disk, folder.path(), &LENS, 2, &settings).unwrap();
        let mut memory = MemoryTier::new(&LENS, 2).unwrap();
        for (salt, act) in acts.iter().enumerate() {
            match act {
                Act::Announce(list) => {
                    files.announce(list).unwrap();
                    // Half of what was announced is used, in its order.
                    for span in list.iter().step_by(2) {
                        prop_assert_eq!(change(&mut files, span, salt as f32), change(&mut memory, span, salt as f32));
                    }
                }
                Act::With(span) => {
                    prop_assert_eq!(change(&mut files, span, salt as f32), change(&mut memory, span, salt as f32));
                }
                Act::Flush => files.flush().unwrap(),
            }
        }
        for (buffer, len) in LENS.into_iter().enumerate() {
            for start in (0..len).step_by(1000) {
                let span = span(buffer, start..(start + 1000).min(len));
                prop_assert_eq!(change(&mut files, &span, 0.0), change(&mut memory, &span, 0.0));
            }
        }
    }
}

#[test]
fn sweeps_go_through_a_small_pool() {
    let folder = tempfile::tempdir().unwrap();
    let lens = [100_000];
    let mut files = FileTier::new(folder.path(), &lens, 3, &settings(4096)).unwrap();
    let mut memory = MemoryTier::new(&lens, 3).unwrap();
    let sweep: Vec<Span> = (0..100_000).step_by(4096).map(|i| span(0, i..(i + 4096).min(100_000))).collect();
    for step in 0..4 {
        files.announce(&sweep).unwrap();
        for span in &sweep {
            assert_eq!(change(&mut files, span, step as f32), change(&mut memory, span, step as f32));
        }
    }
    let bytes = files.bytes();
    assert!(bytes.host < 400_000 && bytes.file >= 1_200_000, "{bytes:?}");
    assert_eq!(memory.bytes().host, 1_200_000);
}

#[test]
fn what_the_pool_must_hold_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let small = FileSettings { pool: Some(100_000), ..settings(4096) };
    let error = FileTier::new(folder.path(), &[100_000], 3, &small).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("expected at least 144KiB (3 pages for spans of up to 4096 elements), found 100KB"),
        "{text}"
    );
    assert_eq!(error.exit_code(), 2);
    let mut tier = FileTier::new(folder.path(), &[100_000], 3, &settings(4096)).unwrap();
    for (wrong, text) in [
        (span(0, 0..99_999), "largest span"),
        (span(0, 5..100_001), "expected elements within 0..100000"),
        (span(1, 0..1), "expected a buffer below 1, found 1"),
    ] {
        let error = tier.with(&wrong, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        assert!(tier.announce(&[wrong]).is_err());
    }
    change(&mut tier, &span(0, 0..4096), 1.0);
}

#[test]
fn a_full_drive_is_noticed_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Arc::new(Faulty { free: Some(1_000_000), ..Faulty::default() });
    let error = FileTier::on(disk, folder.path(), &[1 << 20], 3, &settings(4096)).unwrap_err().to_string();
    assert!(error.contains("need 12.6MB (12587008 bytes), and 1.0MB (1000000 bytes) are free"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

/// Calls until an error comes.
fn until_it_fails(tier: &mut FileTier) -> Error {
    for step in 0..200 {
        let span = span(0, step % 24 * 4096..(step % 24 + 1) * 4096);
        if let Err(error) = tier.with(&span, &mut |arrays| {
            arrays[0][0] += 1.0;
            Ok(())
        }) {
            return error;
        }
    }
    tier.flush().unwrap_err()
}

#[test]
fn failed_reads_and_writes_are_errors_from_then_on() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    for (code, from, text) in [
        (EIO, 4, "look for errors of the drive"),
        (EIO, 60, "look for errors of the drive"),
        (ENOSPC, 30, "free some space"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let disk = Arc::new(Faulty { fail: Some((from, code)), ..Faulty::default() });
        let mut tier = FileTier::on(disk, folder.path(), &[100_000], 1, &settings(4096)).unwrap();
        let error = until_it_fails(&mut tier).to_string();
        assert!(error.contains("buffer-0: ") && error.contains(" bytes at offset ") && error.contains(text), "{error}");
        let again = tier.with(&span(0, 0..1), &mut |_| Ok(())).unwrap_err().to_string();
        assert_eq!(again, error);
        assert!(tier.announce(&[]).is_err() && tier.flush().is_err());
        drop(tier);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_file_that_is_cut_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut tier = FileTier::new(folder.path(), &[100_000], 1, &settings(4096)).unwrap();
    let path = tier.cache.stores()[0].path.clone();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(BLOCK as u64).unwrap();
    let error = tier.with(&span(0, 0..10), &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("buffer-0") && error.contains("offset 4096"), "{error}");
}

#[test]
fn a_header_that_changed_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut tier = FileTier::new(folder.path(), &[10], 1, &FileSettings { direct: false, ..settings(10) }).unwrap();
    change(&mut tier, &span(0, 0..10), 1.0);
    tier.flush().unwrap();
    let mut file = OpenOptions::new().write(true).open(&tier.cache.stores()[0].path).unwrap();
    file.write_all(b"not ours").unwrap();
    let error = tier.flush().unwrap_err().to_string();
    assert!(error.contains("something else wrote to it"), "{error}");
}

#[test]
fn what_the_file_system_cannot_do_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Arc::new(Faulty { ordinary: true, sparse: true, ..Faulty::default() });
    let mut tier = FileTier::on(disk, folder.path(), &LENS, 2, &settings(2000)).unwrap();
    let notes = tier.notes().join("\n");
    assert!(notes.contains("with ordinary IO") && notes.contains("reserves no room"), "{notes}");
    let mut memory = MemoryTier::new(&LENS, 2).unwrap();
    let all = span(0, 100..2000);
    assert_eq!(change(&mut tier, &all, 1.0), change(&mut memory, &all, 1.0));
    let usual = FileTier::new(folder.path(), &LENS, 2, &settings(2000)).unwrap();
    assert!(usual.notes().iter().any(|note| note.contains("direct IO")), "{:?}", usual.notes());
}

#[test]
fn offsets_are_not_cut_to_32_bits() {
    let folder = tempfile::tempdir().unwrap();
    // 6 GB that take no room on the drive.
    let disk = Arc::new(Faulty { sparse: true, free: Some(u64::MAX), ..Faulty::default() });
    let len = 500_000_000;
    let mut tier = FileTier::on(disk, folder.path(), &[len], 3, &settings(1024)).unwrap();
    // The last elements, those 2 GiB and 4 GiB before them, the first.
    let places = [len - 100, len - 100 - (1 << 31) / 12, len - 100 - (1usize << 32) / 12, 0];
    let written = places.map(|at| change(&mut tier, &span(0, at..at + 100), at as f32));
    for at in (1..40).map(|i| i * 5000) {
        change(&mut tier, &span(0, at..at + 100), 0.0);
    }
    for (at, written) in places.into_iter().zip(written) {
        let mut read = Vec::new();
        tier.with(&span(0, at..at + 100), &mut |arrays| {
            read = arrays.iter().map(|array| array.to_vec()).collect();
            Ok(())
        })
        .unwrap();
        assert_eq!(read, written);
    }
}

#[test]
fn an_error_of_the_work_is_passed_on_and_hurts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut tier = FileTier::new(folder.path(), &[5000], 1, &settings(1000)).unwrap();
    for range in [0..10, 1020..1030] {
        let error = tier.with(&span(0, range.clone()), &mut |arrays| {
            arrays[0][3] = 7.0;
            Err(Error::Engine("no".into()))
        });
        assert_eq!(error.unwrap_err().to_string(), "no");
        let mut kept = 0.0;
        tier.with(&span(0, range), &mut |arrays| {
            kept = arrays[0][3];
            Ok(())
        })
        .unwrap();
        assert_eq!(kept, 7.0);
    }
    tier.flush().unwrap();
}

#[test]
fn dead_runs_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dead = folder.path().join("states-1-0");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("lock"), "").unwrap();
    fs::write(dead.join("buffer-0"), "left").unwrap();
    let tier = FileTier::new(folder.path(), &LENS, 1, &settings(1000)).unwrap();
    assert!(tier.notes()[0].contains("1 folder(s) that earlier runs left"), "{:?}", tier.notes());
    let other = FileTier::new(folder.path(), &LENS, 1, &settings(1000)).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    drop((tier, other));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
