//! TensorBoard event files, without TensorBoard.
//!
//! A file is a row of TFRecords (length, masked crc32c of the length, data, masked crc32c of the data), each holding an
//! `Event` message (`tensorflow/core/util/event.proto`): wall_time = 1 (double), step = 2 (int64), file_version = 3
//! (string), summary = 5, session_log = 7. A scalar is a `Summary.Value` with tag = 1 and simple_value = 2 (float).

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::step::StepRecord;
use crate::{Error, Result};

/// Appends events to a file of its own in a folder.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// A new event file in `folder`, which is made. A resumed run says from which step on it writes anew, so that
    /// TensorBoard forgets the later steps of the earlier files.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn create(folder: &Path, resumed_at: Option<u64>) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // TensorBoard reads the files of a folder in the order of their names.
        let path = folder.join(format!(
            "events.out.tfevents.{:010}.{:09}.{}.zf",
            now.as_secs(),
            now.subsec_nanos(),
            std::process::id()
        ));
        let file = OpenOptions::new().create_new(true).append(true).open(&path).map_err(|e| Error::io(&path, e))?;
        let mut writer = Self { path, file };
        let mut version = event(0);
        bytes_field(&mut version, 3, b"brain.Event:2");
        writer.append(&version)?;
        if let Some(step) = resumed_at {
            // SessionLog { status = START }.
            let mut restart = event(step);
            bytes_field(&mut restart, 7, &[0x08, 0x01]);
            writer.append(&restart)?;
        }
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the curves of one step.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn write(&mut self, record: &StepRecord) -> Result<()> {
        let mut scalars = vec![
            ("train/loss", record.loss),
            ("train/lr", record.lr),
            ("train/grad_norm", record.grad_norm),
            ("speed/tokens_per_second", record.tokens_per_second),
            ("speed/tflops", record.tflops),
            ("seconds/step", record.seconds.step),
            ("seconds/stall", record.seconds.stall),
            ("memory/device_peak", record.memory.device_peak as f64),
        ];
        if let Some(loss) = record.validation_loss {
            scalars.push(("validation/loss", loss));
        }
        if let Some(turnover) = record.turnover {
            scalars.push(("select/turnover", turnover));
        }
        self.scalars(record.step, &scalars)
    }

    /// Appends any scalars of one step.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, scalar) in scalars {
            let mut value = Vec::new();
            bytes_field(&mut value, 1, tag.as_bytes());
            value.push(2 << 3 | 5);
            value.extend((*scalar as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &value);
        }
        let mut message = event(step);
        bytes_field(&mut message, 5, &summary);
        self.append(&message)
    }

    fn append(&mut self, message: &[u8]) -> Result<()> {
        self.file.write_all(&frame(message)).map_err(|e| Error::io(&self.path, e))
    }
}

/// An `Event` with the time and step.
fn event(step: u64) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut message = vec![1 << 3 | 1];
    message.extend(now.as_secs_f64().to_le_bytes());
    message.push(2 << 3);
    varint(&mut message, step);
    message
}

/// A field of bytes, a string or a message.
fn bytes_field(message: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    message.push(number << 3 | 2);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

/// A TFRecord.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked(data).to_le_bytes());
    record
}

/// TFRecord's masked crc32c: rotated right by 15 bits, plus a constant.
pub(super) fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}
