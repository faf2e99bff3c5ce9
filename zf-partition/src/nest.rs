//! Owners that nest: what a rank updates lies within what it reduces, and that within what it holds.

use zf_core::Result;
use zf_core::layout::{Flat, Layout, Owner, Placement, Slot};

use crate::scope::Sizes;

/// Equal shards of `numel` elements, a multiple of `sizes.o`: placements of parameters, gradients and optimizer states.
///
/// The buffer is cut in p pieces, piece j for member j. Each is cut in g/p pieces: piece j of what member m holds goes to
/// member `j p + m` of the groups for gradients. Each of those is cut in o/g: piece k of what member q reduces goes to member
/// `k g + q` of the groups for optimizer states. A rank is member r mod size, and the sizes divide each other, so its ranges
/// nest. Where p, g and o are each 1 or one same number, this is [`Placement::even`].
pub(crate) fn even(numel: usize, sizes: Sizes) -> Result<[Placement; 3]> {
    let mut group = 1;
    let mut owners = vec![Owner { start: 0, end: numel, member: 0 }];
    let mut level = |size: usize| {
        let factor = size / group;
        owners = owners
            .iter()
            .flat_map(|o| {
                let piece = (o.end - o.start) / factor;
                (0..factor).map(move |j| Owner {
                    start: o.start + j * piece,
                    end: o.start + (j + 1) * piece,
                    member: j * group + o.member,
                })
            })
            .collect();
        group = size;
        Placement::custom(numel, size, owners.clone())
    };
    Ok([level(sizes.p)?, level(sizes.g)?, level(sizes.o)?])
}

/// Gives every trained parameter of `layout` to one member of each group as a whole, for update rules that see whole
/// matrices. Frozen buffers, and parameters that are not split, stay as they are.
///
/// Sizes are balanced over the whole model, first over the p members that hold parameters, then over the g/p members that
/// reduce what one of these holds, then over the o/g that update it: each time the largest parameter first, to the member
/// with the least so far; of equals the first parameter and the lowest member (Graham, "Bounds on Multiprocessing Timing
/// Anomalies", 1969). Members differ by one parameter at most. Padding goes with the last parameter of its buffer.
pub(crate) fn whole(layout: &mut Layout, sizes: Sizes) -> Result<()> {
    let trained = |flat: &Flat| flat.trainable && flat.numel > 0;
    let slots = layout.flats.iter().filter(|flat| trained(flat)).flat_map(|flat| &flat.slots);
    let numels: Vec<usize> = slots.map(|slot| slot.numel).collect();
    let [params, grads, optim] = balance(&numels, sizes);
    let mut first = 0;
    for flat in layout.flats.iter_mut().filter(|flat| trained(flat)) {
        let mine = first..first + flat.slots.len();
        first = mine.end;
        // Small units may be held by every rank although others are split.
        if flat.params.group() > 1 {
            flat.params = place(flat, sizes.p, &params[mine.clone()])?;
        }
        flat.grads = place(flat, sizes.g, &grads[mine.clone()])?;
        flat.optim = place(flat, sizes.o, &optim[mine])?;
    }
    Ok(())
}

/// The members that get items of these sizes, for parameters, gradients and optimizer states.
fn balance(numels: &[usize], sizes: Sizes) -> [Vec<usize>; 3] {
    let mut order: Vec<usize> = (0..numels.len()).collect();
    order.sort_by_key(|&item| std::cmp::Reverse(numels[item]));
    let (mut group, mut member) = (1, vec![0; numels.len()]);
    [sizes.p, sizes.g, sizes.o].map(|size| {
        let mut load = vec![0; size];
        for &item in &order {
            // The members m, m + group, m + 2 group, ... share what m had one level above.
            let candidates = (member[item]..size).step_by(group);
            let least = candidates.min_by_key(|&m| load[m]).expect("size is a positive multiple of group");
            load[least] += numels[item];
            member[item] = least;
        }
        group = size;
        member.clone()
    })
}

/// The placement in which slot i of `flat` belongs to `members[i]`, and padding to the last that is not empty.
fn place(flat: &Flat, group: usize, members: &[usize]) -> Result<Placement> {
    let slots = flat.slots.iter().zip(members).filter(|(slot, _)| slot.numel > 0);
    let owner = |(slot, &member): (&Slot, &usize)| Owner { start: slot.offset, end: slot.offset + slot.numel, member };
    let mut owners: Vec<Owner> = slots.map(owner).collect();
    if let Some(last) = owners.last_mut() {
        last.end = flat.numel;
    }
    Placement::custom(flat.numel, group, owners)
}
