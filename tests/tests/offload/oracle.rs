//! ZenFlow written down once more, plainly: one rank, dense arrays, autograd, a few loops. Nothing of the engine is used but the
//! order of data and the definition of what a step is.
//!
//! It follows the eleven rules of the algorithm one by one and is compared by bits, so that it also repeats the order of
//! roundings: micro-batches are added in order in float32; a gradient is multiplied by the step's factor once; a window's sum
//! is the sum of such products.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};
use zf_core::config::Unused;
use zf_core::data::{BatchPlan, Order, OrderKind, Split, assemble};
use zf_core::layout::DType;
use zf_core::model::{Noise, ParamSpec};
use zf_core::stage::Axis;
use zf_model::plain::PlainContext;

use crate::lab::Lab;

/// What is simulated.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) ratio: f64,
    /// S and R.
    pub(super) interval: u64,
    pub(super) every: u64,
    pub(super) asynchronous: bool,
    pub(super) late: bool,
    pub(super) warmup: u64,
    pub(super) mean_lr: bool,
    pub(super) axis: Axis,
    pub(super) fold: bool,
    pub(super) betas: [f64; 2],
    pub(super) eps: f64,
}

/// What came out, to be compared by bits.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    /// The mean loss of each step.
    pub(super) losses: Vec<u64>,
    /// By parameter and kind, everything made visible at the end.
    pub(super) state: BTreeMap<(String, String), Vec<u32>>,
}

/// The bits of numbers, where a zero has no sign.
pub(super) fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| (value + 0.0).to_bits()).collect()
}

/// One parameter.
struct Weight {
    spec: ParamSpec,
    /// As forward and backward see it.
    visible: Tensor,
    shown: Vec<f32>,
    master: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    /// By column; one for a parameter without columns.
    counts: Vec<u64>,
    chosen: Vec<bool>,
    /// Whether it has columns to choose from.
    divided: bool,
    lr: f64,
    decay: f64,
    /// The window's sum of the columns that are not chosen.
    sum: Vec<f32>,
    touched: bool,
    pending: Option<Pending>,
    /// Pending updates of columns that were chosen meanwhile.
    late: Option<Pending>,
}

/// An update that was submitted and is not visible.
#[derive(Clone)]
struct Pending {
    columns: Vec<bool>,
    grad: Vec<f32>,
    scale: f32,
    /// The schedule's factor.
    factor: f64,
    /// The masters after it, once it was made.
    made: Option<Vec<f32>>,
}

impl Weight {
    fn column(&self, at: usize, rules: &Rules) -> usize {
        if !self.divided {
            return 0;
        }
        let [_, row, input] = matrix(&self.spec, rules).expect("it is divided");
        let along = if rules.axis == Axis::Input { input } else { 1 - input };
        if along == 0 { at / row } else { at % row }
    }

    /// AdamW on the elements of some columns, whose counts were advanced.
    fn update(&mut self, columns: &[bool], grad: &[f32], scale: f32, factor: f64, rules: &Rules) {
        let [b1, b2] = rules.betas;
        let lr = self.lr * factor;
        let power = |base: f64, count: u64| base.powi(i32::try_from(count).expect("few updates"));
        for (at, grad) in grad.iter().enumerate() {
            let column = self.column(at, rules);
            if !columns[column] {
                continue;
            }
            let count = self.counts[column];
            let g = grad * scale;
            let mut p = self.master[at] * (1.0 - lr * self.decay) as f32;
            let m = self.m[at] + (g - self.m[at]) * (1.0 - b1) as f32;
            let v = self.v[at] * b2 as f32 + (g * g) * (1.0 - b2) as f32;
            let d = v.sqrt() * (1.0 / (1.0 - power(b2, count)).sqrt()) as f32 + rules.eps as f32;
            p -= (m * (lr / (1.0 - power(b1, count))) as f32) / d;
            (self.master[at], self.m[at], self.v[at]) = (p, m, v);
        }
    }

    fn count(&mut self, columns: &[bool]) {
        self.counts.iter_mut().zip(columns).filter(|(_, on)| **on).for_each(|(count, _)| *count += 1);
    }

    /// Shows values of the elements of some columns to forward.
    fn show(&mut self, columns: &[bool], values: &[f32], rules: &Rules) {
        for (at, value) in values.iter().enumerate() {
            if columns[self.column(at, rules)] {
                self.shown[at] = *value;
            }
        }
    }

    fn unchosen(&self) -> Vec<bool> {
        self.chosen.iter().map(|chosen| !chosen).collect()
    }

    /// The best columns of a gradient, ties to the lower index.
    fn best(&self, grad: &[f32], scale: f32, rules: &Rules) -> Vec<bool> {
        let columns = self.counts.len();
        let mut scores = vec![0f64; columns];
        for (at, grad) in grad.iter().enumerate() {
            scores[self.column(at, rules)] += f64::from((grad * scale).abs());
        }
        let many = ((rules.ratio * columns as f64 + 1e-9).floor() as usize).clamp(1, columns);
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let mut chosen = vec![false; columns];
        order[..many].iter().for_each(|&column| chosen[column] = true);
        chosen
    }

    /// Makes the pending update where it was not made, but not of the columns `keep`, which take it along.
    fn make(&mut self, keep: Option<&[bool]>, rules: &Rules) {
        if self.pending.as_ref().is_none_or(|pending| pending.made.is_some()) {
            return;
        }
        let Some(mut pending) = self.pending.take() else { return };
        if let Some(keep) = keep {
            let later: Vec<bool> = pending.columns.iter().zip(keep).map(|(on, keep)| *on && *keep).collect();
            pending.columns.iter_mut().zip(keep).for_each(|(on, keep)| *on &= !keep);
            self.late = later.contains(&true).then(|| Pending { columns: later, ..pending.clone() });
        }
        self.count(&pending.columns);
        self.update(&pending.columns, &pending.grad, pending.scale, pending.factor, rules);
        pending.made = Some(self.master.clone());
        self.pending = Some(pending);
    }

    /// Makes what is pending visible, unless its column was chosen meanwhile.
    fn reveal(&mut self, rules: &Rules) {
        if let Some(pending) = self.pending.take() {
            let still: Vec<bool> =
                pending.columns.iter().zip(&self.chosen).map(|(on, chosen)| *on && !chosen).collect();
            self.show(&still, &pending.made.expect("made at the beginning of the window"), rules);
        }
        if let Some(late) = self.late.take() {
            self.count(&late.columns);
            self.update(&late.columns, &late.grad, late.scale, late.factor, rules);
            let masters = self.master.clone();
            self.show(&late.columns, &masters, rules);
        }
    }

    /// Submits the window's sum.
    fn submit(&mut self, length: u64, factor: f64) {
        if std::mem::take(&mut self.touched) {
            let grad = std::mem::take(&mut self.sum);
            let scale = (1.0 / length as f64) as f32;
            self.pending = Some(Pending { columns: self.unchosen(), grad, scale, factor, made: None });
        }
    }
}

/// Rows, elements of a row, and the input dimension of a parameter that has columns.
fn matrix(spec: &ParamSpec, rules: &Rules) -> Option<[usize; 3]> {
    let dims: Vec<usize> = spec.shape.iter().map(|&dim| usize::try_from(dim).expect("not negative")).collect();
    let input = match dims.len() {
        2 => spec.input_dim.unwrap_or(1),
        3.. if rules.fold => 1,
        _ => return None,
    };
    let row = dims[1..].iter().product();
    (dims[0] * row > 0).then_some([dims[0], row, input])
}

fn weights(lab: &Lab, cx: &PlainContext, rules: &Rules) -> Vec<Weight> {
    let base = lab.optimizer.base();
    let mut all = Vec::new();
    for (spec, tensor) in cx.parameters() {
        let group = base.groups.iter().find(|group| group.matches(&spec.name));
        if !spec.trainable || group.is_some_and(|group| group.frozen) {
            continue;
        }
        let loaded = lab.weights.load(spec).expect("loads").to_kind(Kind::Float).contiguous().view([-1]);
        let master = Vec::<f32>::try_from(&loaded).expect("floats");
        let columns = matrix(spec, rules).map_or(1, |[rows, row, input]| {
            let along = if rules.axis == Axis::Input { input } else { 1 - input };
            if along == 0 { rows } else { row }
        });
        let divided = matrix(spec, rules).is_some();
        let default = if spec.shape.len() >= 2 { base.weight_decay } else { 0.0 };
        all.push(Weight {
            spec: spec.clone(),
            visible: tensor.shallow_clone(),
            shown: master.clone(),
            m: vec![0.0; master.len()],
            v: vec![0.0; master.len()],
            master,
            counts: vec![0; columns],
            chosen: vec![!divided; columns],
            divided,
            lr: group.and_then(|group| group.lr).unwrap_or(base.lr),
            decay: group.and_then(|group| group.weight_decay).unwrap_or(default),
            sum: Vec::new(),
            touched: false,
            pending: None,
            late: None,
        });
    }
    all
}

/// Simulates as many steps as there are `norms`, which the engine reports and by which it clips: they are checked, and their
/// last bits are taken over.
pub(super) fn simulate(lab: &Lab, rules: &Rules, norms: &[f64]) -> Outcome {
    tch::set_num_threads(1);
    let kind = lab.options.dtype.kind();
    let mut cx = PlainContext::new(&*lab.model, &*lab.weights, kind, Device::Cpu).expect("loads");
    let mut weights = weights(lab, &cx, rules);
    let order = Order::new(lab.dataset.len(Split::Train), 1, OrderKind::Sequential);
    let plan = BatchPlan::new(lab.global, lab.micro, 1, true).expect("divides");
    let micro_tokens = (lab.micro * lab.dataset.sequence_length()) as f64;
    let (mut update, mut warmup, mut position, mut lr_sum, mut last_factor) = (0u64, rules.warmup, 0u64, 0.0, 0.0);
    let mut losses = Vec::new();
    for (step, norm) in (0u64..).zip(norms) {
        cx.noise = Noise { seed: lab.options.seed, step };
        let (mut loss, mut tokens) = (0f64, 0u64);
        let mut grads: Vec<Option<Vec<f32>>> = weights.iter().map(|_| None).collect();
        for turn in plan.turns(step, 0) {
            let batch = assemble(&*lab.dataset, &order, Split::Train, &turn, Device::Cpu).expect("made up");
            let sum = lab.model.loss(&cx, &batch).expect("runs").sum;
            loss += sum.double_value(&[]);
            tokens += batch.target_tokens;
            if sum.requires_grad() {
                (sum * (1.0 / micro_tokens)).backward();
            }
            for (weight, total) in weights.iter().zip(&mut grads) {
                // The next backward makes a gradient anew.
                if let Some(grad) = zf_sys::autograd::grad(&weight.visible) {
                    zf_sys::autograd::set_grad(&weight.visible, None).expect("a leaf");
                    let grad = Vec::<f32>::try_from(grad.to_kind(Kind::Float).contiguous().view([-1])).expect("floats");
                    match total {
                        Some(total) => total.iter_mut().zip(&grad).for_each(|(total, grad)| *total += grad),
                        None => *total = Some(grad),
                    }
                }
            }
        }
        losses.push((loss / tokens as f64).to_bits());
        let factor = micro_tokens / tokens as f64;
        let squares: f64 = grads.iter().flatten().flatten().map(|&g| f64::from(g) * f64::from(g)).sum();
        let own = squares.sqrt() * factor;
        assert!((own - norm).abs() <= 1e-9 * own, "step {step}: the norm is {own}, the engine says {norm}");
        let clip = lab.options.clip;
        let coefficient = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let scale = (factor * coefficient) as f32;
        let rate = lab.schedule.factor(step, lab.options.total_steps);
        if lab.options.unused == Unused::Zeros {
            let zeros = |(weight, grad): (&Weight, &mut Option<Vec<f32>>)| {
                grad.get_or_insert_with(|| vec![0.0; weight.master.len()]);
            };
            weights.iter().zip(&mut grads).for_each(zeros);
        }

        // Rule 3: choose; rule 6: a pending update of a column that becomes chosen goes first, or waits.
        let choosing = warmup == 0 && update.is_multiple_of(rules.every);
        for (weight, grad) in weights.iter_mut().zip(&grads) {
            let before = weight.chosen.clone();
            // One that is not used keeps what it has, and begins with the lowest.
            let nothing = vec![0.0; weight.master.len()];
            let unused = (!weight.chosen.contains(&true)).then_some(&nothing);
            if let Some(grad) = grad.as_ref().or(unused).filter(|_| choosing && weight.divided) {
                weight.chosen = weight.best(grad, scale, rules);
            }
            let new: Vec<bool> = weight.chosen.iter().zip(&before).map(|(now, before)| *now && !before).collect();
            weight.make((rules.late && rules.asynchronous).then_some(&new[..]), rules);
            let masters = weight.master.clone();
            weight.show(&new, &masters, rules);
        }
        // Rules 4 and 5: chosen columns now, the others into the window.
        for (weight, grad) in weights.iter_mut().zip(&grads) {
            let Some(grad) = grad else { continue };
            let products = grad.iter().map(|grad| grad * scale);
            if weight.touched {
                weight.sum.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
            } else {
                weight.sum = products.collect();
            }
            weight.touched = true;
            let chosen = weight.chosen.clone();
            weight.count(&chosen);
            weight.update(&chosen, grad, scale, rate, rules);
            let masters = weight.master.clone();
            weight.show(&chosen, &masters, rules);
        }
        (lr_sum, last_factor) = (lr_sum + rate, rate);
        position += 1;
        let (length, delayed) = if warmup > 0 { (1, false) } else { (rules.interval, rules.asynchronous) };
        if warmup > 0 {
            warmup -= 1
        } else {
            update += 1
        }
        if position == length {
            let rate = if rules.mean_lr { lr_sum / length as f64 } else { rate };
            end_window(&mut weights, length, rate, delayed, rules);
            (position, lr_sum) = (0, 0.0);
        }
        refresh(&weights, lab.options.dtype);
    }

    // Rule 11: the pending update, then the partial window.
    for weight in &mut weights {
        weight.make(None, rules);
        weight.reveal(rules);
    }
    if position > 0 {
        let rate = if rules.mean_lr { lr_sum / position as f64 } else { last_factor };
        end_window(&mut weights, position, rate, false, rules);
    }
    let mut state = BTreeMap::new();
    for weight in weights {
        assert_eq!(bits_of(&weight.shown), bits_of(&weight.master), "{}: drained", weight.spec.name);
        for (kind, values) in [("master", &weight.master), ("exp_avg", &weight.m), ("exp_avg_sq", &weight.v)] {
            state.insert((weight.spec.name.clone(), kind.to_owned()), bits_of(values));
        }
    }
    Outcome { losses, state }
}

/// What was pending becomes visible, and the window is submitted; or the window becomes visible itself.
fn end_window(weights: &mut [Weight], length: u64, factor: f64, delayed: bool, rules: &Rules) {
    for weight in weights {
        weight.reveal(rules);
        weight.submit(length, factor);
        if !delayed {
            weight.make(None, rules);
            weight.reveal(rules);
        }
    }
}

/// Writes what is visible into the tensors of the model.
fn refresh(weights: &[Weight], dtype: DType) {
    let _guard = tch::no_grad_guard();
    for weight in weights {
        let values = Tensor::from_slice(&weight.shown).to_kind(dtype.kind());
        weight.visible.shallow_clone().view([-1]).copy_(&values);
    }
}
