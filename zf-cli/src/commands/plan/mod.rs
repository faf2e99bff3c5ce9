//! `zf plan`: what a run will hold and move, without making a tensor.

mod offload;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use zf_core::config::{self, DeviceKind, Run};
use zf_core::layout::Layout;
use zf_core::mesh::Mesh;
use zf_core::model::Model;
use zf_core::plan::{OffloadCosts, Plan, PlanOptions, STAGES, Sizes, States, Summation, at_stage, plan, with_frozen};
use zf_core::registry::Registry;
use zf_core::stage::CommBytes;
use zf_core::{Error, Result, slots};
use zf_model::folder::model_from_config;
use zf_partition::ByteSize;

use self::offload::{Kind, kinds};
use super::size::bytes;
use super::train;

/// What cannot be planned.
const NOTES: [&str; 2] = [
    "Activations come on top: what autograd keeps depends on operators, sequence length and micro-batch.",
    "Buffers are the least that the strategy needs. Step time and stall are not predicted in this version.",
];

/// More ranks than this are a typing error, of which each would get a row.
const MOST_RANKS: usize = 1 << 20;

/// Plans the run file with the overrides of the command line, on `ranks` ranks instead of its own if given, and says
/// whether it fits into `memory` bytes a device (that of the run file's emulated device if none is given).
///
/// # Errors
/// Those of the run file, the model's configuration and the partitioner; an output that cannot be written.
pub fn run(
    file: &Path,
    overrides: &[String],
    ranks: Option<usize>,
    memory: Option<ByteSize>,
    as_json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let registry = Registry::global()?;
    let run = config::load(Some(file), overrides, registry)?;
    let emulated = run.device.memory.filter(|_| run.device.kind == DeviceKind::Emulated).map(|memory| memory.0);
    let planned = Planned::new(&run, registry, ranks, emulated)?;
    let memory = memory.or(emulated.map(ByteSize));
    if as_json {
        writeln!(out, "{:#}", planned.as_value(memory)?)?;
        return Ok(());
    }
    planned.print(&file.display().to_string(), memory, out)
}

/// A run file's plan, and what led to it.
struct Planned {
    layout: Layout,
    options: PlanOptions,
    plan: Plan,
    dtype: zf_core::layout::DType,
    kinds: Vec<Kind>,
    notes: Vec<String>,
}

/// The same model under one stage of ZeRO.
struct Stage {
    stage: u8,
    plan: Plan,
    largest: Option<f64>,
}

/// Whether a layout has no place for the offload's parameters.
fn does_not_suit<T>(plan: &Result<T>) -> bool {
    matches!(plan, Err(Error::Config(_)))
}

impl Planned {
    fn new(run: &Run, registry: &Registry, ranks: Option<usize>, emulated: Option<u64>) -> anyhow::Result<Self> {
        let (own, node) = world(run)?;
        let Some(ranks) = ranks.or(own) else {
            return Err(
                Error::Config("the run file does not say how many ranks there are; give --ranks N".into()).into()
            );
        };
        if ranks == 0 {
            return Err(Error::Config("--ranks 0: a run has at least one rank".into()).into());
        }
        if ranks > MOST_RANKS {
            return Err(Error::Config(format!("--ranks {ranks}: expected at most {MOST_RANKS} ranks")).into());
        }
        let cx = run.context();
        let model = model(run, registry)?;
        let partitioner = run.build::<slots::Partition>(registry, &cx)?;
        let optimizer = run.build::<slots::Optim>(registry, &cx)?;
        let (mut notes, micro_batches) = batches(run, ranks, own)?;
        let node = if (1..ranks).contains(&node) { node } else { ranks };
        let mesh = Mesh::data(ranks)?.with_node(node)?;
        let units = with_frozen(model.units(), optimizer.base());
        let layout = partitioner.layout(&units, run.run.dtype, &mesh, optimizer.needs())?;
        let options = PlanOptions {
            exact: run.run.exact,
            reduce_when: run.reduce.when,
            accumulate: run.reduce.accumulate,
            micro_batches,
            states: optimizer.state().len(),
            transfers: partitioner.transfers(&mesh),
            offload: train::offload_stages(run, registry, &cx)?.and_then(|stages| OffloadCosts::of(&stages, emulated)),
        };
        let kinds = kinds(run, registry, &cx, optimizer.needs(), emulated)?;
        let plan = plan(&layout, &options)?;
        notes.extend(NOTES.map(str::to_owned));
        Ok(Self { layout, options, plan, dtype: run.run.dtype, kinds, notes })
    }

    fn ranks(&self) -> usize {
        self.plan.per_rank.len()
    }

    /// The same model and options under each stage that the offload suits.
    fn stages(&self, memory: Option<ByteSize>) -> Result<Vec<Stage>> {
        let of = |stage| {
            let layout = at_stage(&self.layout, stage)?;
            let plan = plan(&layout, &self.options)?;
            let largest = memory.map(|memory| largest_model(&plan, memory.0));
            Ok(Stage { stage, plan, largest })
        };
        STAGES.into_iter().map(of).filter(|stage| !does_not_suit(stage)).collect()
    }

    fn as_value(&self, memory: Option<ByteSize>) -> Result<Value> {
        let room = memory.map(|memory| memory.0);
        let (device, host) = self.plan.held();
        let (worst, busiest) = (self.plan.worst(), self.plan.busiest());
        let stage = |stage: &Stage| {
            let device = &stage.plan.worst().device;
            json!({
                "stage": stage.stage,
                "device": states(device),
                "traffic": stage.plan.busiest().traffic.total(),
                "fits": memory.map(|memory| device.total() <= memory.0),
                "largest_model": stage.largest.map(|parameters| parameters as u64),
            })
        };
        Ok(json!({
            "parameters": self.plan.parameters,
            "parameters_with_padding": self.plan.elements,
            "dtype": self.dtype,
            "ranks": self.ranks(),
            "ranks_per_node": self.plan.ranks_per_node,
            "micro_batches": self.options.micro_batches,
            "scope": Sizes::of(&self.layout),
            "summation": self.plan.summation,
            "worst": { "rank": worst.rank, "device": states(&worst.device), "host": states(&worst.host), "file": worst.file },
            "total": { "device": states(&device), "host": states(&host) },
            "traffic": {
                "rank": busiest.rank,
                "inside_node": busiest.traffic.inside_node,
                "between_nodes": busiest.traffic.between_nodes,
                "total": busiest.traffic.total(),
                "all_ranks": self.plan.moved().total(),
            },
            "per_rank": self.plan.per_rank,
            "device_memory": memory.map(|memory| memory.0),
            "fits": memory.map(|memory| worst.device.total() <= memory.0),
            "would_fit": room.map(|room| self.remedies(room)).transpose()?,
            "offload": self.kinds_value(room)?,
            "stages": self.stages(memory)?.iter().map(stage).collect::<Vec<_>>(),
            "notes": self.notes,
        }))
    }

    fn print(&self, name: &str, memory: Option<ByteSize>, out: &mut dyn Write) -> anyhow::Result<()> {
        let (plan, Sizes { p, g, o }) = (&self.plan, Sizes::of(&self.layout));
        let padding = plan.elements - plan.parameters;
        let dtype = format!("{:?}", self.dtype).to_lowercase();
        writeln!(out, "{name}: {} parameters in {dtype}, and {padding} elements of padding", plan.parameters)?;
        writeln!(out, "ranks      {}, {} a node", self.ranks(), plan.ranks_per_node)?;
        writeln!(out, "split over {p} (parameters), {g} (gradients), {o} (optimizer states) ranks")?;
        writeln!(
            out,
            "gradients  {}; micro-batches a rank and step: {}\n",
            when(plan.summation),
            self.options.micro_batches
        )?;
        self.print_states(out)?;
        self.print_traffic(out)?;
        self.print_link(out)?;
        self.print_stages(memory, out)?;
        self.print_kinds(memory.map(|memory| memory.0), out)?;
        if let Some(memory) = memory {
            writeln!(out, "{memory} a device: {}\n", self.verdict(memory.0)?)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "{note}"))?;
        Ok(())
    }

    /// What the rank that holds most holds, by category, and all ranks together.
    fn print_states(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let worst = self.plan.worst();
        let (device, host) = self.plan.held();
        let rank = format!("rank {}", worst.rank);
        let mut table = table(["held", &format!("{rank}, device"), "exactly", &format!("{rank}, host"), "all ranks"]);
        let rows: [(&str, fn(&States) -> u64); 5] = [
            ("parameters", |states| states.parameters),
            ("gradients", |states| states.gradients),
            ("optimizer", |states| states.optimizer),
            ("buffers, at least", |states| states.buffers),
            ("sum", States::total),
        ];
        for (what, of) in rows {
            let (near, far, all) = (of(&worst.device), of(&worst.host), of(&device) + of(&host));
            table.add_row([what.to_owned(), bytes(near), near.to_string(), bytes(far), bytes(all)]);
        }
        if worst.file > 0 {
            let all = self.plan.per_rank.iter().map(|rank| rank.file).sum();
            table.add_row(["in files".to_owned(), String::new(), String::new(), bytes(worst.file), bytes(all)]);
        }
        finish(table, out)
    }

    /// What the rank that sends most sends in a step.
    fn print_traffic(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let busiest = self.plan.busiest();
        let (near, far, all) = (busiest.traffic.inside_node, busiest.traffic.between_nodes, self.plan.moved().total());
        let rank = format!("rank {}", busiest.rank);
        let mut table = table([
            "sent in a step",
            &format!("{rank}, inside a node"),
            &format!("{rank}, between nodes"),
            "all ranks",
        ]);
        let rows: [(&str, fn(&CommBytes) -> u64); 4] = [
            ("all_reduce", |bytes| bytes.all_reduce),
            ("reduce_scatter", |bytes| bytes.reduce_scatter),
            ("all_gather", |bytes| bytes.all_gather),
            ("sum", sum),
        ];
        for (what, of) in rows {
            table.add_row([what.to_owned(), bytes(of(&near)), bytes(of(&far)), bytes(of(&all))]);
        }
        finish(table, out)
    }

    /// What each stage of ZeRO over all ranks would need.
    fn print_stages(&self, memory: Option<ByteSize>, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut head = vec!["stage", "parameters", "gradients", "optimizer", "buffers", "sum a rank", "sent in a step"];
        if memory.is_some() {
            head.extend(["fits", "largest model, states alone"]);
        }
        let mut table = table(head);
        for Stage { stage, plan, largest } in self.stages(memory)? {
            let held = plan.worst().device;
            let sizes = [held.parameters, held.gradients, held.optimizer, held.buffers, held.total()].map(bytes);
            let mut row = vec![stage.to_string()];
            row.extend(sizes);
            row.push(bytes(sum(&plan.busiest().traffic.total())));
            if let (Some(memory), Some(largest)) = (memory, largest) {
                row.push(if held.total() <= memory.0 { "yes" } else { "no" }.to_owned());
                row.push(count(largest));
            }
            table.add_row(row);
        }
        finish(table, out)
    }
}

/// Parameters of the largest model of this kind whose states fit into `memory` bytes a rank.
fn largest_model(plan: &Plan, memory: u64) -> f64 {
    let held = plan.worst().device;
    memory as f64 * plan.parameters as f64 / (held.parameters + held.gradients + held.optimizer).max(1) as f64
}

/// The model, without its weights where it is a folder: `config.json` alone is read.
fn model(run: &Run, registry: &Registry) -> Result<Arc<dyn Model>> {
    if run.stage::<slots::Model>() == Some("folder")
        && let Some(path) = setting(run, "model", "path")
        && let Some(path) = path.as_str()
    {
        let config = run.context().path(path).join("config.json");
        if let Ok(text) = std::fs::read(&config) {
            let value = serde_json::from_slice(&text)
                .map_err(|error| Error::Input(format!("{}: {error}", config.display())))?;
            return model_from_config(&config, &value);
        }
    }
    Ok(run.build::<slots::Model>(registry, &run.context())?.model)
}

/// Ranks as the transport's settings say, and how many share a machine (0: all).
fn world(run: &Run) -> Result<(Option<usize>, usize)> {
    let number = |key: &str| {
        let value = setting(run, "transport", key).and_then(|value| value.as_integer());
        value
            .map(|number| usize::try_from(number).map_err(|_| run.error_at(&format!("transport.{key}"), "is negative")))
    };
    Ok((number("ranks").transpose()?, number("ranks_per_node").transpose()?.unwrap_or(0)))
}

fn setting(run: &Run, section: &str, key: &str) -> Option<toml::Value> {
    run.resolved().into_iter().find(|(name, _)| name == section)?.1.remove(key)
}

/// Micro-batches of a rank in a step. Where the global batch does not divide over other ranks than the file's, each rank
/// keeps what it had, which is said.
fn batches(run: &Run, ranks: usize, own: Option<usize>) -> Result<(Vec<String>, usize)> {
    match (run.accumulation(ranks), own) {
        (Ok(micro_batches), _) => Ok((Vec::new(), micro_batches)),
        (Err(error), own) if own == Some(ranks) => Err(error),
        (Err(_), own) => {
            let micro_batches = run.accumulation(own.unwrap_or(1))?;
            let global = run.run.micro_batch.saturating_mul(micro_batches).saturating_mul(ranks);
            let note = format!(
                "A global batch of {} does not divide over {ranks} ranks; planned with {micro_batches} accumulated a rank, \
                 which makes it {global}.",
                run.run.global_batch
            );
            Ok((vec![note], micro_batches))
        }
    }
}

fn when(summation: Summation) -> &'static str {
    match summation {
        Summation::Loose => "where autograd makes them, given back after the update",
        Summation::Boundary => "summed once a step, full size until then",
        Summation::MicroBatch => "summed after each micro-batch, by the owners of gradients",
        Summation::InOrder => "summed after each micro-batch in the order of ranks, by the owners of optimizer states",
    }
}

fn states(states: &States) -> Value {
    let mut value = json!(states);
    value["total"] = states.total().into();
    value
}

fn sum(bytes: &CommBytes) -> u64 {
    bytes.all_reduce + bytes.reduce_scatter + bytes.all_gather
}

/// Parameters for people: `7.64 billion`.
fn count(parameters: f64) -> String {
    let (unit, name) = match parameters {
        n if n < 1e6 => (1e3, "thousand"),
        n if n < 1e9 => (1e6, "million"),
        _ => (1e9, "billion"),
    };
    format!("{:.2} {name}", parameters / unit)
}

fn table<T: Into<comfy_table::Cell>>(head: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(head.into_iter().map(Into::into).collect::<Vec<comfy_table::Cell>>());
    table
}

fn finish(mut table: Table, out: &mut dyn Write) -> anyhow::Result<()> {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Ok(writeln!(out, "{table}\n")?)
}
