//! The plan's part on states off the device: the link, other kinds of offload, and what would make a run fit.

use std::io::Write;
use std::sync::Arc;

use serde_json::{Value, json};
use zf_core::config::Run;
use zf_core::engine::OffloadStages;
use zf_core::plan::{OffloadCosts, Plan, PlanOptions, STAGES, at_stage, plan};
use zf_core::registry::{BuildContext, Registry, Slot};
use zf_core::stage::{Needs, Offload, OffloadPolicy};
use zf_core::{Result, slots};

use super::{Planned, bytes, does_not_suit, finish, table};
use crate::commands::train;

/// Settings of a kind that leave less on the device than its defaults, where it has them.
const SPARING: (&str, &str) = ("parameters", "host");

/// One kind of offload, with the settings of the run file where it is the run's own.
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// Whether it is set to leave less on the device.
    sparing: bool,
    /// Whether the run file asks for it.
    pub(super) own: bool,
    costs: Option<OffloadCosts>,
}

/// The kinds that suit the update rule: the run's own, the others as they are by default, and those that can leave less.
pub(super) fn kinds(
    run: &Run,
    registry: &Registry,
    cx: &BuildContext,
    needs: Needs,
    memory: Option<u64>,
) -> Result<Vec<Kind>> {
    let own = run.stage::<slots::Offload>();
    let selector = train::selector(run, registry, cx)?;
    let mut kinds = Vec::new();
    let names = registry.names(slots::Offload::NAME);
    for (name, sparing) in names.into_iter().flat_map(|name| [(name, false), (name, true)]) {
        let is_own = own == Some(name) && !sparing;
        let built: Result<Arc<dyn Offload>> = if is_own {
            run.build::<slots::Offload>(registry, cx)
        } else {
            let more = sparing.then(|| (SPARING.0.to_owned(), SPARING.1.into()));
            let table = std::iter::once((slots::Offload::KEY.to_owned(), name.into())).chain(more).collect();
            registry.build::<slots::Offload>(&table, cx)
        };
        let offload = match built {
            Ok(offload) => offload,
            Err(error) if is_own => return Err(error),
            // It cannot be had without settings, or does not have these.
            Err(_) => continue,
        };
        if !is_own && kinds.iter().any(|kind: &Kind| kind.own && kind.policy() == offload.policy().as_ref()) {
            continue;
        }
        let stages = OffloadStages { offload, selector: Arc::clone(&selector), links: zf_offload::link::natural() };
        let costs = OffloadCosts::of(&stages, memory);
        if is_own || costs.is_none() || needs == Needs::Elements {
            kinds.push(Kind { name, sparing, own: is_own, costs });
        }
    }
    Ok(kinds)
}

impl Kind {
    /// The keys to set.
    fn keys(&self) -> Vec<String> {
        let sparing = self.sparing.then(|| format!("`offload.{} = \"{}\"`", SPARING.0, SPARING.1));
        std::iter::once(format!("`offload.kind = \"{}\"`", self.name)).chain(sparing).collect()
    }

    fn policy(&self) -> Option<&OffloadPolicy> {
        self.costs.as_ref().map(OffloadCosts::policy)
    }

    fn settings(&self) -> Value {
        if self.sparing { json!({ SPARING.0: SPARING.1 }) } else { json!({}) }
    }

    /// `options` with this kind.
    fn options(&self, options: &PlanOptions) -> PlanOptions {
        PlanOptions { offload: self.costs.clone(), ..options.clone() }
    }
}

/// What a change of settings would need.
pub(super) struct Change<'a> {
    stage: Option<u8>,
    kind: Option<&'a Kind>,
    needed: u64,
}

impl Change<'_> {
    /// The keys to set.
    fn text(&self) -> String {
        let stage = self.stage.map(|stage| format!("`partition.stage = {stage}`"));
        let kind = self.kind.map_or_else(Vec::new, Kind::keys);
        stage.into_iter().chain(kind).collect::<Vec<_>>().join(" and ")
    }

    fn as_value(&self) -> Value {
        let kind = self.kind.map(|kind| kind.name);
        json!({ "stage": self.stage, "offload": kind, "settings": self.kind.map(Kind::settings), "device": self.needed })
    }
}

/// Needed bytes of the worst rank's device.
fn needed(plan: &Plan) -> u64 {
    plan.worst().device.total()
}

impl Planned {
    /// The same run with each kind of offload that suits its layout.
    pub(super) fn by_kind(&self) -> Result<Vec<(&Kind, Plan)>> {
        let plans = self.kinds.iter().map(|kind| Ok((kind, plan(&self.layout, &kind.options(&self.options))?)));
        plans.filter(|plan| !does_not_suit(plan)).collect()
    }

    /// Changes with which it would fit into `memory` bytes: one of stage or offload, or where that is not enough, of both; and
    /// the least that any of them needs.
    fn changes(&self, memory: u64) -> Result<(Vec<Change<'_>>, u64)> {
        let (mut single, mut both, mut least) = (Vec::new(), Vec::new(), u64::MAX);
        for kind in &self.kinds {
            let options = kind.options(&self.options);
            let other = (!kind.own).then_some(kind);
            for stage in std::iter::once(None).chain(STAGES.map(Some)) {
                let plan = match stage {
                    Some(stage) => plan(&at_stage(&self.layout, stage)?, &options),
                    None => plan(&self.layout, &options),
                };
                if does_not_suit(&plan) {
                    continue;
                }
                let needed = needed(&plan?);
                least = least.min(needed);
                let list = if stage.is_some() && other.is_some() { &mut both } else { &mut single };
                if needed <= memory && (stage.is_some() || other.is_some()) {
                    list.push(Change { stage, kind: other, needed });
                }
            }
        }
        Ok((if single.is_empty() { both } else { single }, least))
    }

    /// Whether it fits, and what to do if not.
    pub(super) fn verdict(&self, memory: u64) -> Result<String> {
        let needed = needed(&self.plan);
        if let Some(left) = memory.checked_sub(needed) {
            return Ok(format!("fits, {} left for activations", bytes(left)));
        }
        let short = format!("does not fit, {} too much before any activation", bytes(needed - memory));
        let (changes, least) = self.changes(memory)?;
        Ok(if changes.is_empty() {
            format!("{short}; no stage and no offload makes it fit, the least is {}: take more ranks", bytes(least))
        } else {
            let changes: Vec<String> = changes.iter().take(4).map(Change::text).collect();
            format!("{short}; it would with {}", changes.join(", or "))
        })
    }

    /// [`Planned::verdict`] as data; null where it fits.
    pub(super) fn remedies(&self, memory: u64) -> Result<Value> {
        if needed(&self.plan) <= memory {
            return Ok(Value::Null);
        }
        Ok(self.changes(memory)?.0.iter().map(Change::as_value).collect())
    }

    /// All kinds as data.
    pub(super) fn kinds_value(&self, memory: Option<u64>) -> Result<Value> {
        let of = |(kind, plan): (&Kind, Plan)| {
            let (worst, busiest) = (plan.worst(), busiest(&plan));
            json!({
                "kind": kind.name,
                "settings": kind.settings(),
                "own": kind.own,
                "device": super::states(&worst.device),
                "host": super::states(&worst.host),
                "file": worst.file,
                "link": busiest.link,
                "fits": memory.map(|memory| worst.device.total() <= memory),
            })
        };
        Ok(self.by_kind()?.into_iter().map(of).collect())
    }

    /// What crosses the link of the rank whose link carries most, where one is used.
    pub(super) fn print_link(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.options.offload.is_none() {
            return Ok(());
        }
        let rank = busiest(&self.plan);
        let link = &rank.link;
        let sums = if link.sums_on_device { "the device" } else { "the host" };
        let mut table = table(["link in a step", &format!("rank {}", rank.rank), "all ranks"]);
        let all = |of: fn(&zf_core::plan::LinkPlan) -> u64| self.plan.per_rank.iter().map(|rank| of(&rank.link)).sum();
        let rows: [(&str, fn(&zf_core::plan::LinkPlan) -> u64); 3] = [
            ("gradients to the host", |link| link.to_host),
            ("parameters to the device", |link| link.to_device),
            ("columns both ways, an estimate", |link| link.moves_estimate),
        ];
        for (what, of) in rows {
            table.add_row([what.to_owned(), bytes(of(link)), bytes(all(of))]);
        }
        finish(table, out)?;
        writeln!(out, "gradients of a window are added up on {sums}; the host's figures are the most that it needs\n")?;
        Ok(())
    }

    /// What each kind of offload would need.
    pub(super) fn print_kinds(&self, memory: Option<u64>, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut head =
            vec!["offload", "device, a rank", "host, at most", "files", "link up, a step", "link down, a step"];
        head.extend(memory.map(|_| "fits"));
        let mut table = table(head);
        for (kind, plan) in self.by_kind()? {
            let (worst, link) = (plan.worst(), busiest(&plan).link);
            let what = match (kind.own, kind.sparing) {
                (true, _) => " (this run)".to_owned(),
                (false, true) => format!(", {} = \"{}\"", SPARING.0, SPARING.1),
                (false, false) => String::new(),
            };
            let mut row = vec![format!("{}{what}", kind.name)];
            let figures = [worst.device.total(), worst.host.total(), worst.file, link.to_host, link.to_device];
            row.extend(figures.map(bytes));
            row.extend(memory.map(|memory| if worst.device.total() <= memory { "yes" } else { "no" }.to_owned()));
            table.add_row(row);
        }
        finish(table, out)
    }
}

/// The rank whose link carries most, the first of several.
fn busiest(plan: &Plan) -> &zf_core::plan::RankPlan {
    let carried = |rank: &&zf_core::plan::RankPlan| rank.link.to_host + rank.link.to_device;
    let order = |a: &&zf_core::plan::RankPlan, b: &&zf_core::plan::RankPlan| {
        carried(a).cmp(&carried(b)).then(b.rank.cmp(&a.rank))
    };
    plan.per_rank.iter().max_by(order).expect("a mesh has at least one rank")
}
