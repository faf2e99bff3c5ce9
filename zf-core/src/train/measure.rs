//! What a run writes down: metrics, events, the summary.

use std::collections::BTreeMap;
use std::time::Instant;

use zf_sys::heap::{Category, Heap, HeapStats};

use super::rank::Loop;
use crate::checkpoint::Best;
use crate::config::DeviceKind;
use crate::engine::StepReport;
use crate::files::write_atomic;
use crate::layout::{DType, Layout};
use crate::plan::{Holds, Moved, OffloadCosts, PlanOptions, Predictor};
use crate::record::{
    DECISIONS, DecisionsWriter, EventWriter, LinkBytes, METRICS, Memory, MetricsWriter, RankSummary, SUMMARY, Seconds,
    StepRecord, Summary, read_metrics,
};
use crate::stage::{CommBytes, HostWork, Traffic};
use crate::{Error, Result};

/// Measures one rank; on rank 0 it also writes the run folder's files.
pub(crate) struct Meter {
    heap: Heap,
    started: Instant,
    before: CommBytes,
    traffic: Traffic,
    work: HostWork,
    highest: Memory,
    files: Option<Files>,
    parameters: u64,
    predictor: Predictor,
}

struct Files {
    metrics: MetricsWriter,
    events: Option<EventWriter>,
    decisions: DecisionsWriter,
}

impl Meter {
    pub(crate) fn new(run: &Loop<'_>, heap: Heap) -> Result<Self> {
        let files = (run.rank == 0).then(|| Files::open(run)).transpose()?;
        let layout = run.engine.layout();
        let parameters = layout.parameters() as u64;
        let before = run.engine.comm_bytes();
        let stages = &run.training.stages;
        let (states, transfers) = (stages.optimizer.state().len(), stages.partitioner.transfers(&layout.mesh));
        let (traffic, work) = (run.engine.link_traffic(), run.engine.host_work());
        let emulated = run.training.device.kind == DeviceKind::Emulated;
        let memory = run.training.device.memory.filter(|_| emulated).map(|memory| memory.0);
        let options = PlanOptions {
            offload: stages.offload.as_ref().and_then(|stages| OffloadCosts::of(stages, memory)),
            ..PlanOptions::of(&run.plan.options, states, transfers)
        };
        let moved = Moved { comm: before, link: traffic };
        let predictor = Predictor::new(&layout, &options, run.rank, moved, run.engine.updates())?;
        Ok(Self {
            heap,
            started: Instant::now(),
            before,
            traffic,
            work,
            highest: Memory::default(),
            files,
            parameters,
            predictor,
        })
    }

    /// Bytes that this rank holds now.
    pub(crate) fn live_bytes(&self) -> f64 {
        self.heap.stats().live.total() as f64
    }

    /// What a person should know at the start.
    pub(crate) fn notes(&self, run: &Loop<'_>) -> Vec<String> {
        let training = run.training;
        let layout = run.engine.layout();
        let mut notes = vec![format!(
            "{} parameters in {} units, {:?} on {} rank{}, masters and moments in float32",
            self.parameters,
            layout.units.len(),
            training.run.dtype,
            run.world,
            if run.world == 1 { "" } else { "s" },
        )];
        notes.extend(training.data.dataset.notes());
        notes.extend(run.engine.offload_notes());
        notes
    }

    /// Books a step; the record where one is due.
    pub(crate) fn step(
        &mut self,
        run: &Loop<'_>,
        report: &StepReport,
        validation_loss: Option<f64>,
    ) -> Result<Option<StepRecord>> {
        // All ranks validate equally often, the last time perhaps without a sequence.
        let round = run.plan.batches.micro_batch() * run.world as u64;
        let validated = validation_loss.map_or(0, |_| run.plan.validation.div_ceil(round.max(1)));
        self.predictor.step(report, validated);
        if let (Some(files), Some(decision)) = (&mut self.files, report.offload.decision) {
            files.decisions.write(&decision)?;
        }
        let every = run.training.log.every.max(1);
        let last = report.step + 1 == run.plan.steps || report.stop;
        if !report.step.is_multiple_of(every) && !last && validation_loss.is_none() {
            return Ok(None);
        }
        let bytes = run.engine.comm_bytes();
        let (traffic, work) = (run.engine.link_traffic(), run.engine.host_work());
        let mut memory = memory(&self.heap.stats());
        if let Some(host) = run.engine.host_heap() {
            memory.host_live = host.stats().live.total().unsigned_abs();
            memory.file_live = work.bytes.file;
        }
        self.heap.reset_peak();
        if memory.device_peak > self.highest.device_peak {
            self.highest = memory;
        }
        let tokens_per_second = report.tokens as f64 / report.seconds.step.max(1e-9);
        let length = run.training.data.dataset.sequence_length();
        let record = StepRecord {
            step: report.step,
            loss: report.loss,
            lr: report.lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tokens_per_second,
            tflops: tokens_per_second * run.training.model.model.flops_per_token(length) / run.world as f64 / 1e12,
            skipped: report.skipped,
            loss_scale: (run.training.run.dtype == DType::Float16).then_some(report.loss_scale),
            validation_loss,
            staleness: report.offload.staleness,
            turnover: report.offload.turnover,
            interval: (report.offload.interval > 0).then_some(report.offload.interval),
            seconds: Seconds {
                host: work.updating + work.adding - self.work.updating - self.work.adding,
                ..report.seconds
            },
            comm_bytes: bytes.since(&self.before),
            link_bytes: link_bytes(&traffic, &self.traffic),
            memory,
        };
        self.before = bytes;
        (self.traffic, self.work) = (traffic, work);
        if let Some(files) = &mut self.files {
            files.metrics.write(&record)?;
            files.events.as_mut().map(|events| events.write(&record)).transpose()?;
        }
        Ok(Some(record))
    }

    /// The summary, the same on all ranks, all of which must call this.
    pub(crate) fn finish(&mut self, run: &mut Loop<'_>, best: Option<Best>) -> Result<Summary> {
        // The last checkpoint waited for all that was in flight.
        let comm_bytes = run.engine.comm_bytes();
        let ended = run.engine.steps() >= run.plan.steps;
        let holds = Holds { device: self.heap.stats().live, tier: run.engine.host_work().bytes };
        let moved = Moved { comm: comm_bytes, link: run.engine.link_traffic() };
        let prediction = self.predictor.finish(&holds, &moved, ended);
        let mine = RankSummary {
            rank: run.rank,
            memory: self.highest,
            comm_bytes,
            link_bytes: link_bytes(&run.engine.link_traffic(), &Traffic::default()),
            prediction,
        };
        let state_hash = run.engine.state_hash()?;
        let sent = serde_json::to_vec(&mine).map_err(|error| Error::Engine(error.to_string()))?;
        let per_rank = run.engine.exchange("summary", sent)?;
        let per_rank = per_rank
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(|error| Error::comm(format!("summary: {error}"))))
            .collect::<Result<Vec<_>>>()?;
        let folder = &run.training.folder;
        let records = if self.files.is_some() { read_metrics(&folder.join(METRICS))? } else { Vec::new() };
        let mut summary = Summary {
            complete: run.engine.steps() >= run.plan.steps,
            state_hash,
            command: run.training.command.clone(),
            versions: versions(),
            ranks: run.world,
            parameters: self.parameters,
            best,
            prediction: per_rank.first().map(|rank: &RankSummary| rank.prediction).unwrap_or_default(),
            per_rank,
            ..Summary::from_records(&records)
        };
        summary.totals.wall_seconds = self.started.elapsed().as_secs_f64();
        if let Some(files) = &self.files {
            files.metrics.sync()?;
            summary.write(&folder.join(SUMMARY))?;
        }
        Ok(summary)
    }
}

impl Files {
    fn open(run: &Loop<'_>) -> Result<Self> {
        let training = run.training;
        let folder = &training.folder;
        std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
        write_atomic(&folder.join("run.toml"), training.resolved.as_bytes())?;
        let path = folder.join(METRICS);
        let from = training.resume.as_ref().map(|_| run.engine.steps());
        let metrics = match from {
            Some(step) => MetricsWriter::resume(&path, step)?,
            None => MetricsWriter::create(&path)?,
        };
        let events = training.log.tensorboard.then(|| EventWriter::create(&folder.join("tensorboard"), from));
        let decisions = DecisionsWriter::open(folder.join(DECISIONS), run.engine.offload_updates())?;
        Ok(Self { metrics, events: events.transpose()?, decisions })
    }
}

/// Names, shapes and types: what a checkpoint of the same model agrees on.
pub(crate) fn model_identity(layout: &Layout) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut slots: Vec<_> = layout.slots().map(|(_, slot)| (&slot.name, &slot.shape)).collect();
    slots.sort();
    for (name, shape) in slots {
        hasher.update(format!("{name}{shape:?}\n").as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_string()
}

/// Versions of the program and of libtorch.
pub(crate) fn versions() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("zenflow-rs".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("libtorch".to_string(), zf_sys::device::libtorch_version()),
    ])
}

/// What crossed the link since `before`.
fn link_bytes(now: &Traffic, before: &Traffic) -> LinkBytes {
    LinkBytes {
        to_host: now.to_host - before.to_host,
        to_device: now.to_device - before.to_device,
        moves: now.moves - before.moves,
    }
}

fn memory(stats: &HeapStats) -> Memory {
    let bytes = |value: i64| u64::try_from(value).unwrap_or(0);
    let at = |category| bytes(stats.at_peak[category]);
    Memory {
        device_peak: bytes(stats.peak),
        device_live: bytes(stats.live.total()),
        host_live: 0,
        file_live: 0,
        parameters: at(Category::Parameters),
        gradients: at(Category::Gradients),
        optimizer: at(Category::Optimizer),
        activations: at(Category::Activations),
        buffers: at(Category::Buffers) + at(Category::Other),
    }
}
