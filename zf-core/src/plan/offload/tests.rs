use proptest::prelude::*;

use super::*;
use crate::layout::{Layout, Placement};
use crate::mesh::Mesh;
use crate::model::{Init, ParamSpec, UnitSpec};
use crate::plan::plan;
use crate::stage::{Axis, HostPool, Links, ParametersOn, Site};

/// A policy by itself.
#[derive(Debug)]
struct Bare(OffloadPolicy);

impl Offload for Bare {
    fn policy(&self) -> Option<OffloadPolicy> {
        Some(self.0.clone())
    }

    fn open(&self, _: Site) -> Result<Box<dyn HostPool>> {
        Err(crate::Error::Engine("a plan opens nothing".into()))
    }
}

/// Chooses the first columns.
#[derive(Debug, Clone)]
struct First(f64);

impl Selector for First {
    fn clone_box(&self) -> Box<dyn Selector> {
        Box::new(self.clone())
    }

    fn axis(&self) -> Axis {
        Axis::Input
    }

    fn every(&self) -> Every {
        Every::Updates(8)
    }

    fn score(&self) -> Option<&dyn crate::stage::Score> {
        None
    }

    fn choose(&mut self, weight: &Candidates<'_>) -> Result<Vec<u32>> {
        Ok((0..(self.0 * weight.columns as f64) as u32).collect())
    }
}

#[derive(Debug)]
struct NoLinks;

impl Links for NoLinks {
    fn open(
        &self,
        _: usize,
        _: tch::Device,
        _: &[usize],
        _: &crate::trace::Trace,
    ) -> Result<Arc<dyn crate::stage::Link>> {
        Err(crate::Error::Engine("a plan opens nothing".into()))
    }
}

/// k = 0.1, S = 4, asynchronous.
fn zenflow() -> OffloadPolicy {
    OffloadPolicy {
        keeps: Keeps::Chosen,
        interval: Interval::Fixed(4),
        asynchronous: true,
        promotion: Promotion::Flush,
        warmup: 0,
        wire: Wire::Model,
        accumulate: AccumulateOn::Host,
        parameters: ParametersOn::Device,
        buffer_bytes: 4000,
        buffers: 2,
        mean_lr: false,
        fold: false,
    }
}

/// One weight of `rows` x 100 in bfloat16, its states split over `ranks` ranks; a plan with AdamW.
fn planned(policy: OffloadPolicy, rows: i64, ranks: usize) -> RankPlan {
    let unit = UnitSpec {
        name: "layer".into(),
        params: vec![ParamSpec::new("w", &[rows, 100], Init::Ones).input_dim(1)],
        root: false,
    };
    let layout = Layout::pack(&[unit], DType::Bfloat16, &Mesh::data(ranks).unwrap(), ranks, |_, numel| {
        Ok([Placement::replicated(numel), Placement::replicated(numel), Placement::even(numel, ranks)?])
    });
    let stages =
        OffloadStages { offload: Arc::new(Bare(policy)), selector: Arc::new(First(0.1)), links: Arc::new(NoLinks) };
    let options = PlanOptions { offload: OffloadCosts::of(&stages, None), ..PlanOptions::new(2) };
    plan(&layout.unwrap(), &options).unwrap().per_rank.swap_remove(0)
}

/// The formulas of ZeRO-Offload and ZenFlow, for M elements of states on a rank, k = 0.1 and S = 4.
#[test]
fn costs_are_those_of_the_formulas() {
    for ranks in [1, 2, 4] {
        let m = 40_000 / ranks as u64;
        let [on_host, on_device, zero] = [
            zenflow(),
            OffloadPolicy { accumulate: AccumulateOn::Device, ..zenflow() },
            OffloadPolicy {
                keeps: Keeps::Nothing,
                interval: Interval::Fixed(1),
                asynchronous: false,
                accumulate: AccumulateOn::Host,
                ..zenflow()
            },
        ]
        .map(|policy| planned(policy, 400, ranks));
        let parameters = 40_000 * 2;
        assert_eq!([&on_host, &on_device, &zero].map(|rank| rank.device.parameters), [parameters; 3]);
        // 12 k on the device, 12 with the host.
        assert_eq!([&on_host, &on_device, &zero].map(|rank| 10 * rank.device.optimizer), [12 * m, 12 * m, 0]);
        assert_eq!([&on_host, &on_device, &zero].map(|rank| rank.host.optimizer), [12 * m; 3]);
        // 8 (1-k) more on the device with sums there; staging buffers each way.
        let staging = 2 * 2 * 4000;
        let sums = on_device.device.gradients - on_host.device.gradients;
        assert_eq!(10 * sums, 4 * 9 * m);
        assert_eq!(10 * (on_device.device.buffers - on_host.device.buffers), 4 * 9 * m);
        assert_eq!(zero.device.buffers, on_host.device.buffers);
        assert_eq!(on_host.device.buffers, staging);
        // At most 26 with sums on the host, 18 with sums on the device, and constant buffers.
        let constant = staging + 3 * 4000;
        assert!(on_host.host.total() <= 26 * m + constant, "{:?}", on_host.host);
        assert!(on_device.host.total() <= 18 * m + constant, "{:?}", on_device.host);
        // 2 a step each way; 2 (1-k) up and 2 (1-k) / S down; both divided by S.
        let link = |rank: &RankPlan| [10 * rank.link.to_host, 10 * rank.link.to_device];
        assert_eq!(link(&zero), [20 * m, 20 * m]);
        assert_eq!(link(&on_host), [18 * m, 18 * m / 4]);
        assert_eq!(link(&on_device), [18 * m / 4, 18 * m / 4]);
        assert_eq!(10 * on_host.link.first_moves, 12 * m);
        // A turnover of 0.3 exchanges 0.3 / 1.7 of the columns, here each eighth step.
        let moves = 12.0 * 0.1 * m as f64 * 2.0 * (0.3 / 1.7) / 8.0;
        assert!((on_host.link.moves_estimate as f64 - moves).abs() < 1.0, "{moves}");
        assert_eq!(on_host.link.slack, Slack::default(), "rows are whole");
    }
}

/// In exact mode, or if asked for, gradients are float32.
#[test]
fn the_wire_has_its_own_type() {
    let bytes = |wire, dtype, exact| OffloadPolicy { wire, ..zenflow() }.wire_bytes(dtype, exact);
    assert_eq!(bytes(Wire::Model, DType::Bfloat16, false), 2);
    assert_eq!(bytes(Wire::Model, DType::Float32, false), 4);
    assert_eq!(bytes(Wire::Model, DType::Float16, true), 4);
    assert_eq!(bytes(Wire::Float32, DType::Bfloat16, false), 4);
}

#[test]
fn sums_go_to_an_emulated_device_that_has_room() {
    let unit = [UnitSpec {
        name: "layer".into(),
        params: vec![ParamSpec::new("w", &[100, 100], Init::Ones).input_dim(1)],
        root: false,
    }];
    let layout = Layout::pack(&unit, DType::Bfloat16, &Mesh::data(1).unwrap(), 1, |_, numel| {
        Ok([Placement::replicated(numel), Placement::replicated(numel), Placement::replicated(numel)])
    })
    .unwrap();
    let sums = |memory| {
        let policy = OffloadPolicy { accumulate: AccumulateOn::Auto, ..zenflow() };
        let stages =
            OffloadStages { offload: Arc::new(Bare(policy)), selector: Arc::new(First(0.1)), links: Arc::new(NoLinks) };
        let options = PlanOptions { offload: OffloadCosts::of(&stages, memory), ..PlanOptions::new(2) };
        plan(&layout, &options).unwrap().per_rank[0].link.sums_on_device
    };
    assert_eq!([None, Some(300_000), Some(400_000)].map(sums), [false, false, true]);
}

proptest! {
    /// The mean and the ends of what a shard can have, against all choices' own counts.
    #[test]
    fn shards_have_what_columns_leave(
        rows in 1usize..12, columns in 1usize..12, contiguous in any::<bool>(), ends in (0usize..200, 0usize..200),
        count in 0usize..13, set in prop::collection::vec(any::<u32>(), 12),
    ) {
        let (numel, count) = (rows * columns, count.min(columns));
        let shape = if contiguous { Shape::Contiguous { len: rows } } else { Shape::Strided { count: columns } };
        let chosen = Chosen { shape, numel, columns, count, least: count, most: count };
        let (a, b) = (ends.0 % (numel + 1), ends.1 % (numel + 1));
        let (from, to) = (a.min(b), a.max(b));
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by_key(|&column| set[column]);
        let here = |element: &usize| !order[..count].contains(&shape.column_of(*element));
        let with_host = (from..to).filter(here).count();
        let between = chosen.with_host(from, to);
        prop_assert!(between.least <= with_host && with_host <= between.most, "{:?} {}", between, with_host);
        prop_assert!(with_host.abs_diff(between.mean) <= between.slack(), "{:?} {}", between, with_host);
        // Shares of neighbours add up, and the whole is exact.
        let whole = chosen.with_host(0, numel);
        prop_assert_eq!([whole.least, whole.mean, whole.most], [rows * (columns - count); 3]);
        let parts = [(0, from), (from, to), (to, numel)].map(|(from, to)| chosen.with_host(from, to).mean);
        prop_assert_eq!(parts.iter().sum::<usize>(), whole.mean);
    }
}
