//! Metrics, summaries, comparisons and event files.

use std::fs;
use std::path::Path;

use super::tensorboard::masked;
use super::*;
use crate::Error;
use crate::checkpoint::Best;

fn record(step: u64) -> StepRecord {
    let loss = 5.899_432_182_312_012 - step as f64 / 3.0;
    StepRecord {
        step,
        loss,
        lr: 0.001,
        grad_norm: 3.9648,
        tokens: 512,
        tokens_per_second: 18211.0 + step as f64,
        seconds: Seconds { step: 0.028, ..Seconds::default() },
        ..StepRecord::default()
    }
}

/// A run folder of `steps` steps whose records went through `change`.
fn run(folder: &Path, steps: u64, hash: &str, change: impl Fn(&mut StepRecord)) {
    fs::create_dir_all(folder).unwrap();
    let mut writer = MetricsWriter::create(&folder.join(METRICS)).unwrap();
    let records: Vec<StepRecord> = (0..steps)
        .map(|step| {
            let mut record = record(step);
            change(&mut record);
            record
        })
        .collect();
    records.iter().for_each(|record| writer.write(record).unwrap());
    let summary = Summary { state_hash: hash.into(), ..Summary::from_records(&records) };
    summary.write(&folder.join(SUMMARY)).unwrap();
}

fn steps(path: &Path) -> Vec<u64> {
    read_metrics(path).unwrap().iter().map(|r| r.step).collect()
}

#[test]
fn a_line_has_the_documented_keys() {
    // The example of the interface document, in its order.
    let line = r#"{"step":0,"loss":5.899432182312012,"lr":0.001,"grad_norm":3.9648,"tokens":512,"tokens_per_second":18211.0,"tflops":0.09,"skipped":false,"validation_loss":null,"staleness":0,"turnover":null,"seconds":{"step":0.028,"forward":0.009,"backward":0.016,"update":0.003,"comm":0.0,"stall":0.0,"host":0.0},"comm_bytes":{"all_reduce":0,"reduce_scatter":247424,"all_gather":247424,"all_to_all":0,"broadcast":0,"control":412},"link_bytes":{"to_host":0,"to_device":0,"moves":0},"memory":{"device_peak":1,"device_live":1,"host_live":1,"file_live":0,"parameters":1,"gradients":1,"optimizer":1,"activations":1,"buffers":1}}"#;
    let record: StepRecord = serde_json::from_str(line).unwrap();
    assert_eq!(serde_json::to_string(&record).unwrap(), line);
}

#[test]
fn numbers_round_trip_and_infinities_are_null() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS);
    let mut writer = MetricsWriter::create(&path).unwrap();
    let odd = StepRecord { loss: 0.1 + 0.2, grad_norm: f64::INFINITY, skipped: true, ..record(0) };
    writer.write(&odd).unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains(r#""loss":0.30000000000000004,"lr":0.001,"grad_norm":null"#));
    let found = read_metrics(&path).unwrap().remove(0);
    assert_eq!(found.loss.to_bits(), (0.1f64 + 0.2).to_bits());
    assert!(found.grad_norm.is_nan());
}

#[test]
fn resuming_moves_later_lines_and_drops_a_torn_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS);
    let old = folder.path().join(METRICS_OLD);
    let mut writer = MetricsWriter::create(&path).unwrap();
    (0..6).for_each(|step| writer.write(&record(step)).unwrap());
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{whole}{{\"step\":6,\"lo")).unwrap();
    assert_eq!(steps(&path), [0, 1, 2, 3, 4, 5]);
    let mut writer = MetricsWriter::resume(&path, 4).unwrap();
    writer.write(&record(4)).unwrap();
    writer.sync().unwrap();
    assert_eq!((steps(&path), steps(&old)), (vec![0, 1, 2, 3, 4], vec![4, 5]));
    MetricsWriter::resume(&path, 2).unwrap();
    assert_eq!((steps(&path), steps(&old)), (vec![0, 1], vec![4, 5, 2, 3, 4]));
    // The lines themselves are as they were, to the byte.
    assert!(whole.starts_with(&fs::read_to_string(&path).unwrap()));
}

#[test]
fn resuming_without_a_file_starts_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS);
    MetricsWriter::resume(&path, 3).unwrap().write(&record(3)).unwrap();
    assert_eq!(steps(&path), [3]);
    assert!(!folder.path().join(METRICS_OLD).exists());
}

#[test]
fn a_broken_line_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(METRICS);
    let mut writer = MetricsWriter::create(&path).unwrap();
    writer.write(&record(0)).unwrap();
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{whole}{{\"step\": 1}}\n{whole}")).unwrap();
    let error = read_metrics(&path).unwrap_err();
    assert!(error.to_string().contains("metrics.jsonl:2: expected the record of a step"), "{error}");
    assert_eq!(error.exit_code(), 2);
    assert!(matches!(read_metrics(&folder.path().join("none")), Err(Error::Input(_))));
}

#[test]
fn a_summary_adds_up_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(SUMMARY);
    let mut records: Vec<StepRecord> = (0..4).map(record).collect();
    records[1].skipped = true;
    records[2].tokens_per_second = f64::NAN;
    let summary = Summary {
        complete: true,
        best: Some(Best { step: 2, validation_loss: 1.5 }),
        per_rank: vec![RankSummary { rank: 1, ..RankSummary::default() }],
        ..Summary::from_records(&records)
    };
    assert_eq!((summary.totals.steps, summary.totals.skipped, summary.totals.tokens), (4, 1, 2048));
    assert_eq!(summary.medians.tokens_per_second, 18212.0);
    assert_eq!(summary.final_loss, records[3].loss);
    summary.write(&path).unwrap();
    assert_eq!(Summary::read(&path).unwrap(), summary);
    assert!(Summary::from_records(&[]).final_loss.is_nan());
    fs::write(&path, "[").unwrap();
    assert!(Summary::read(&path).unwrap_err().to_string().contains("summary.json: expected the summary"));
}

/// Compares a run of four steps with one whose records went through `change`.
fn compared(mode: Mode, steps: u64, hash: &str, change: impl Fn(&mut StepRecord)) -> Comparison {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    run(&a, 4, "h", |_| ());
    run(&b, steps, hash, change);
    compare(&a, &b, mode).unwrap()
}

fn first(comparison: &Comparison) -> String {
    comparison.first.as_ref().map_or_else(|| "none".into(), ToString::to_string)
}

#[test]
fn equal_runs_agree() {
    let same = compared(Mode::Equal, 4, "h", |r| r.seconds.step = 9.0);
    assert!(same.agree(), "{}", first(&same));
    assert_eq!((same.common, same.loss, same.norm), (4, Some((0.0, 0)), Some((0.0, 0))));
    let step = same.figures.iter().find(|f| f.what.starts_with("step")).unwrap();
    assert_eq!((step.a, step.b), (0.028, 9.0));
    assert!(compared(Mode::Equal, 4, "h", |r| r.loss = f64::NAN).first.is_some());
}

#[test]
fn the_first_difference_is_found() {
    let last_bit = |r: &mut StepRecord| {
        if r.step >= 2 {
            r.loss = f64::from_bits(r.loss.to_bits() + 1);
            r.grad_norm *= 2.0;
        }
    };
    let differing = compared(Mode::Equal, 4, "h", last_bit);
    assert!(first(&differing).starts_with("step 2: loss: 5.2327"), "{}", first(&differing));
    assert_eq!(differing.differences, 4);
    assert_eq!(differing.norm, Some((0.5, 2)));
    let hash = compared(Mode::Equal, 4, "other", |_| ());
    assert_eq!(first(&hash), "state_hash: h and other");
    let short = compared(Mode::Equal, 3, "h", |_| ());
    assert_eq!(first(&short), "step 3: step: present and missing");
    assert_eq!(short.only_a, [3]);
    assert!(compared(Mode::Report, 3, "other", last_bit).agree());
}

#[test]
fn a_tolerance_is_relative() {
    let shift = |by: f64| move |r: &mut StepRecord| r.loss *= 1.0 + by;
    assert!(compared(Mode::Tolerance(1e-3), 4, "other", shift(0.9e-3)).agree());
    let far = compared(Mode::Tolerance(1e-3), 4, "h", shift(1.1e-3));
    assert!(first(&far).starts_with("step 0: loss"), "{}", first(&far));
    assert!(!compared(Mode::Tolerance(1e9), 4, "h", |r| r.loss = f64::INFINITY).agree());
    assert!(!compared(Mode::Tolerance(1.0), 4, "h", |r| r.validation_loss = Some(1.0)).agree());
    assert_eq!(first(&compared(Mode::Tolerance(1.0), 4, "h", |r| r.tokens = 1)), "step 0: tokens: 512 and 1");
    assert_eq!(first(&compared(Mode::Tolerance(1.0), 4, "h", |r| r.skipped = true)), "step 0: skipped: false and true");
}

#[test]
fn a_run_without_summary_can_be_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    run(&a, 4, "h", |_| ());
    run(&b, 4, "h", |_| ());
    fs::remove_file(b.join(SUMMARY)).unwrap();
    assert_eq!(first(&compare(&a, &b, Mode::Equal).unwrap()), "state_hash: h and none");
    let tolerant = compare(&a, &b, Mode::Tolerance(0.0)).unwrap();
    assert!(tolerant.agree());
    let median = tolerant.figures.iter().find(|f| f.what.starts_with("tokens/s")).unwrap();
    assert_eq!(median.a, median.b);
    assert_eq!(compare(&a, &folder.path().join("c"), Mode::Equal).unwrap_err().exit_code(), 2);
}

/// Reads TFRecords and of each event the step, tags with values, and the numbers of its other fields.
fn events(path: &Path) -> Vec<(u64, Vec<(String, f32)>, Vec<u64>)> {
    let bytes = fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let mut events = Vec::new();
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap());
        assert_eq!(u32::from_le_bytes(rest[8..12].try_into().unwrap()), masked(&rest[..8]));
        let data = &rest[12..12 + length as usize];
        rest = &rest[12 + data.len()..];
        assert_eq!(u32::from_le_bytes(rest[..4].try_into().unwrap()), masked(data));
        rest = &rest[4..];
        let (mut step, mut scalars, mut others) = (0, Vec::new(), Vec::new());
        for (number, field) in fields(data) {
            match number {
                2 => step = field.0,
                5 => {
                    for (_, value) in fields(field.1) {
                        let value = fields(value.1);
                        let bits = u32::try_from(value[1].1.0).unwrap();
                        scalars.push((String::from_utf8(value[0].1.1.to_vec()).unwrap(), f32::from_bits(bits)));
                    }
                }
                number => others.push(number),
            }
        }
        events.push((step, scalars, others));
    }
    events
}

/// The fields of a protobuf message: number, and the value of a scalar or the bytes of the rest.
fn fields(mut data: &[u8]) -> Vec<(u64, (u64, &[u8]))> {
    fn varint(data: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = data[0];
            *data = &data[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }
    let mut fields = Vec::new();
    while !data.is_empty() {
        let tag = varint(&mut data);
        let mut take = |n: usize| {
            let (now, later) = data.split_at(n);
            data = later;
            now
        };
        let value = match tag & 7 {
            0 => (varint(&mut data), &[][..]),
            1 => (u64::from_le_bytes(take(8).try_into().unwrap()), &[][..]),
            5 => (u64::from(u32::from_le_bytes(take(4).try_into().unwrap())), &[][..]),
            2 => {
                let length = varint(&mut data) as usize;
                let (now, later) = data.split_at(length);
                data = later;
                (0, now)
            }
            other => panic!("wire type {other}"),
        };
        fields.push((tag >> 3, value));
    }
    fields
}

#[test]
fn tensorboard_events_can_be_decoded() {
    // The check value of CRC-32C, masked: rotated by 15 and shifted by the constant of TFRecord.
    assert_eq!(masked(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(&folder.path().join("tensorboard"), Some(300)).unwrap();
    writer.write(&StepRecord { validation_loss: Some(2.5), ..record(300) }).unwrap();
    writer.scalars(301, &[("x", -1.0)]).unwrap();
    let events = events(writer.path());
    assert_eq!((events[0].0, &events[0].2[..]), (0, &[1, 3][..]), "time and version");
    assert_eq!((events[1].0, &events[1].2[..]), (300, &[1, 7][..]), "time and session log");
    assert_eq!(events[2].0, 300);
    assert_eq!(events[2].1[0], ("train/loss".to_owned(), record(300).loss as f32));
    assert!(events[2].1.contains(&("validation/loss".to_owned(), 2.5)));
    assert_eq!(events[3], (301, vec![("x".to_owned(), -1.0)], vec![1]));
    assert!(writer.path().file_name().unwrap().to_str().unwrap().contains("tfevents"));
}
