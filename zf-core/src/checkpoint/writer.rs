//! Writing a checkpoint: each rank its file, rank 0 the manifest.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::folder::{clean, partial_path, prune, remove_failed, step_path};
use super::manifest::{Entry, FORMAT, FileEntry, MANIFEST, Manifest, Outcome, Part, VERSION, index};
use super::reader::Checkpoint;
use super::shard;
use super::state::{Meta, RankState};
use crate::files::{rename_dir_synced, write_atomic};
use crate::{Error, Result};

/// How long rank 0 goes on waiting for the others once its writer is told to end.
const GRACE: Duration = Duration::from_secs(5);

/// How checkpoints are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How many to keep, beside the best one; 0 keeps all.
    pub keep: usize,
    /// Names this start of the run, the same on all ranks and different for each start ([`new_attempt`] on rank 0, then
    /// broadcast): files of a killed start are never taken for its own. Letters, digits, `-` and `_`.
    pub attempt: String,
    /// How long rank 0 waits for the parts of the other ranks.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { keep: 0, attempt: new_attempt(), timeout: Duration::from_secs(300) }
    }
}

/// A name for [`Options::attempt`] that no other start has.
pub fn new_attempt() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = format!("{}-{}", std::process::id(), now.as_nanos());
    blake3::hash(seed.as_bytes()).to_hex()[..12].to_owned()
}

/// Writes the checkpoints of one rank. Every rank has its own, and all save the same steps in the same order.
#[derive(Debug)]
pub struct Writer {
    root: PathBuf,
    rank: usize,
    options: Options,
    saves: u64,
    ending: Arc<AtomicBool>,
}

impl Writer {
    /// A writer under `root` (`RUN/checkpoints`), which need not exist. Rank 0 removes what killed starts left there.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad attempt name; [`Error::Io`] when leftovers cannot be removed.
    pub fn new(root: &Path, rank: usize, options: Options) -> Result<Self> {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if options.attempt.is_empty() || !options.attempt.chars().all(legal) {
            return Err(Error::Config(format!(
                "checkpoint attempt `{}`: expected letters, digits, `-` and `_`",
                options.attempt
            )));
        }
        if rank == 0 {
            clean(root, &options.attempt)?;
        }
        Ok(Self { root: root.to_path_buf(), rank, options, saves: 0, ending: Arc::default() })
    }

    /// Writes this rank's part; on rank 0 also waits for the others, publishes the checkpoint and deletes old ones. Rank 0
    /// gives `meta`, the others need not. A checkpoint of the same step is replaced.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file; [`Error::Engine`] for pieces that do not cover their tensors exactly, a rank whose
    /// part is missing after the timeout or that could not write it. What was there before stays.
    pub fn save(&mut self, state: RankState, meta: Option<Meta>) -> Result<()> {
        let save = self.saves;
        self.saves += 1;
        if state.rank != self.rank || self.rank >= state.world {
            return Err(Error::Engine(format!(
                "checkpoint of step {}: the writer of rank {} got the state of rank {} of {}",
                state.step, self.rank, state.rank, state.world
            )));
        }
        let partial = partial_path(&self.root, state.step, &self.options.attempt, save);
        fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, e))?;
        let result = shard::write(&partial, &state);
        if self.rank != 0 {
            return self.leave_part(&partial, state.step, state.world, result);
        }
        let own = result?;
        let meta = meta.ok_or_else(|| {
            Error::Engine(format!("checkpoint of step {}: rank 0 must give the meta data", state.step))
        })?;
        if meta.step != state.step {
            return Err(Error::Engine(format!(
                "checkpoint of step {}: the meta data are of step {}",
                state.step, meta.step
            )));
        }
        let (step, world) = (state.step, state.world);
        // The snapshot is written; its memory must not wait for other ranks.
        drop(state);
        let spared: Vec<u64> = meta.best.iter().map(|b| b.step).chain([step]).collect();
        self.publish(&partial, step, world, meta, own)?;
        remove_failed(&self.root, &self.options.attempt, save);
        prune(&self.root, self.options.keep, &spared)
    }

    /// In the place of a save whose state this rank could not collect: tells rank 0 why, so that it does not wait.
    pub(super) fn give_up(&mut self, step: u64, world: usize, reason: String) {
        let save = self.saves;
        self.saves += 1;
        let partial = partial_path(&self.root, step, &self.options.attempt, save);
        if self.rank > 0 && fs::create_dir_all(&partial).is_ok() {
            // Whoever gives up has an error already.
            let _ = self.leave_part(&partial, step, world, Err(Error::Engine(reason)));
        }
    }

    /// A flag that shortens all waiting for other ranks, for a program that is ending.
    pub(super) fn ending(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ending)
    }

    /// Tells rank 0 what this rank wrote, or why it could not.
    fn leave_part(
        &self,
        partial: &Path,
        step: u64,
        world: usize,
        result: Result<(FileEntry, Vec<Entry>)>,
    ) -> Result<()> {
        let outcome = match &result {
            Ok((file, entries)) => Outcome::Written { file: file.clone(), entries: entries.clone() },
            Err(error) => Outcome::Failed { reason: error.to_string() },
        };
        let part = Part { attempt: self.options.attempt.clone(), step, rank: self.rank, world, outcome };
        let path = part_path(partial, self.rank);
        let text = serde_json::to_vec(&part).map_err(|e| Error::Engine(format!("{}: {e}", path.display())))?;
        let left = write_atomic(&path, &text);
        if result.is_err() && left.is_err() {
            // The disk is full: what was written of this part is of no use, and an empty file takes no space.
            let _ = fs::remove_file(partial.join(shard::file_name(self.rank, world)));
            if write_atomic(&path, &text).is_err() {
                let _ = fs::File::create(failed_path(partial, self.rank));
            }
        }
        result?;
        left
    }

    /// Merges the parts into the manifest and gives the folder its name.
    fn publish(
        &self,
        partial: &Path,
        step: u64,
        world: usize,
        mut meta: Meta,
        own: (FileEntry, Vec<Entry>),
    ) -> Result<()> {
        let (file, mut entries) = own;
        let mut files = vec![file];
        for part in self.wait_for_parts(partial, step, world)? {
            match part.outcome {
                Outcome::Written { file, entries: more } => {
                    files.push(file);
                    entries.extend(more);
                }
                Outcome::Failed { reason } => {
                    return Err(Error::Engine(format!(
                        "checkpoint of step {step}: rank {} could not write its part: {reason}",
                        part.rank
                    )));
                }
            }
        }
        index(&entries).map_err(|what| {
            Error::Engine(format!("checkpoint of step {step}: the ranks' pieces do not cover the model: {what}"))
        })?;
        let hash = std::mem::take(&mut meta.state_hash);
        let manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            attempt: self.options.attempt.clone(),
            world,
            meta,
            files,
            entries,
            blake3: String::new(),
        };
        // Opening what was written also shows that every rank's file arrived whole.
        let mut checkpoint = Checkpoint::with_manifest(partial, manifest)?;
        let hash = if hash.is_empty() { checkpoint.state_hash()? } else { hash };
        let manifest = checkpoint.manifest_mut();
        manifest.meta.state_hash = hash;
        let text =
            manifest.to_text().map_err(|what| Error::Engine(format!("checkpoint of step {step}: manifest: {what}")))?;
        for rank in 1..world {
            let path = part_path(partial, rank);
            fs::remove_file(&path).map_err(|e| Error::io(&path, e))?;
        }
        write_atomic(&partial.join(MANIFEST), text.as_bytes())?;
        rename_dir_synced(partial, &step_path(&self.root, step))
    }

    /// The parts of ranks 1 and up, in order, as soon as all are there.
    fn wait_for_parts(&self, partial: &Path, step: u64, world: usize) -> Result<Vec<Part>> {
        let start = Instant::now();
        let mut ending_since = None;
        let mut pause = Duration::from_millis(1);
        let mut parts: Vec<Option<Part>> = vec![None; world.saturating_sub(1)];
        loop {
            for (slot, rank) in parts.iter_mut().zip(1..) {
                if slot.is_none() {
                    *slot = self.read_part(partial, step, rank, world)?;
                }
            }
            if parts.iter().all(Option::is_some) {
                return Ok(parts.into_iter().flatten().collect());
            }
            if self.ending.load(Ordering::Relaxed) {
                ending_since.get_or_insert_with(Instant::now);
            }
            if start.elapsed() > self.options.timeout || ending_since.is_some_and(|since| since.elapsed() > GRACE) {
                let missing: Vec<String> =
                    (1..world).filter(|rank| parts[rank - 1].is_none()).map(|rank| rank.to_string()).collect();
                return Err(Error::Engine(format!(
                    "checkpoint of step {step}: no part from rank {} within {:.0} s; do all ranks see the folder {}?",
                    missing.join(", "),
                    start.elapsed().as_secs_f64(),
                    self.root.display()
                )));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// The part of `rank`, if it is there.
    fn read_part(&self, partial: &Path, step: u64, rank: usize, world: usize) -> Result<Option<Part>> {
        let path = part_path(partial, rank);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                if failed_path(partial, rank).exists() {
                    return Err(Error::Engine(format!(
                        "checkpoint of step {step}: rank {rank} could not write its part, nor why; is the disk of {} full?",
                        self.root.display()
                    )));
                }
                return Ok(None);
            }
            Err(e) => return Err(Error::io(&path, e)),
        };
        let part: Part =
            serde_json::from_slice(&text).map_err(|e| Error::Engine(format!("{}: {e}", path.display())))?;
        let expected = (self.options.attempt.as_str(), step, rank, world);
        let found = (part.attempt.as_str(), part.step, part.rank, part.world);
        if found != expected {
            return Err(Error::Engine(format!(
                "{}: expected the part of (attempt, step, rank, ranks) {expected:?}, found {found:?}",
                path.display()
            )));
        }
        Ok(Some(part))
    }
}

/// What a rank leaves that cannot even write its reason.
fn failed_path(partial: &Path, rank: usize) -> PathBuf {
    partial.join(format!("rank-{rank:05}.failed"))
}

fn part_path(partial: &Path, rank: usize) -> PathBuf {
    partial.join(format!("rank-{rank:05}.json"))
}
