"use strict";
// What the page knows, and what is selected; every view draws itself again when that changes.

// The plan, as page_data.py wrote it.
const plan = JSON.parse(document.getElementById("plan-data").textContent);

// stage: a number or null for all; query: part of a module's name; layer: an index into LAYERS.
const selection = { stage: null, query: "", layer: 0 };

const watchers = [];

// Draws a view now and whenever the selection changes.
function watch(draw) {
  watchers.push(draw);
  draw();
}

// Changes the selection and draws all views again.
function select(change) {
  Object.assign(selection, change);
  for (const draw of watchers) draw();
}

// Selects a stage, or all of them if it is the selected one.
function toggleStage(stage) {
  select({ stage: selection.stage === stage ? null : stage });
}

// Whether a stage is shown.
function isShown(stage) {
  return selection.stage === null || selection.stage === stage;
}

// Whether something that belongs to several stages is shown.
function areShown(stages) {
  return selection.stage === null || stages.includes(selection.stage);
}

// Names that were stored as (characters shared with the one before, rest).
function decodeNames(coded) {
  const names = [];
  let before = "";
  for (let i = 0; i < coded.length; i += 2) {
    before = before.slice(0, coded[i]) + coded[i + 1];
    names.push(before);
  }
  return names;
}

// Parameters as objects, their names in full.
const PARAMETERS = plan.parameters.map(
  ([pattern, names, shape, dtype, stored, used, zero, stages, runnerUp]) =>
    ({ pattern, names: decodeNames(names), shape, dtype, stored, used, zero, stages, runnerUp }),
);

const CONVERSIONS = plan.conversions.map(
  ([pattern, names, source, target, forward, backward, bytes, seconds, count, total, stages,
    alike]) =>
    ({ pattern, names: decodeNames(names), source, target, forward, backward, bytes, seconds,
       count, total, stages, alike }),
);

const OPS = plan.ops.map(
  ([module, op, kind, flow, forward, backward, communication, saved, count, source, stages]) =>
    ({ module, op, names: [module, op], kind, flow, forward, backward, communication, saved, count,
       source, stages, alike: count > 1 }),
);

// Blocks of the model in order, each with the parameters whose name lies in it.
const LAYERS = plan.stages.flatMap((stage) =>
  stage.layers.map(([label, again]) => ({ label, again, stage: stage.index, parameters: [] })));

// Gives every parameter to the block whose label is its longest prefix, in each stage that holds it.
function fillLayers() {
  const byLabel = new Map();
  for (const layer of LAYERS) {
    if (!byLabel.has(layer.label)) byLabel.set(layer.label, []);
    byLabel.get(layer.label).push(layer);
  }
  for (const parameter of PARAMETERS) {
    for (const name of parameter.names) {
      const parts = name.split(".");
      for (let size = parts.length; size > 0; size--) {
        const label = parts.slice(0, size).join(".");
        const layers = byLabel.get(label);
        if (!layers) continue;
        const inside = parts.slice(size).join(".") || name;
        for (const layer of layers) layer.parameters.push({ name, inside, parameter });
        break;
      }
    }
  }
}
fillLayers();

// Whether a text holds every word of a query, which is in small letters.
function holds(text, words) {
  return words.every((word) => text.includes(word));
}

// The words of what somebody typed.
function wordsOf(query) {
  return query.toLowerCase().split(/\s+/).filter(Boolean);
}

// A dotted name with its numbers as stars.
function unnumbered(name) {
  return name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
}

// Those names of a row that hold every word; a row that stands for equal ones elsewhere also holds
// what differs from it in numbers alone.
function namesHolding(row, words) {
  const starred = row.alike ? words.map(unnumbered) : null;
  return row.names.filter((name) => {
    const small = name.toLowerCase();
    return holds(small, words) || (starred !== null && holds(unnumbered(small), starred));
  });
}

// Whether a block, or a parameter in it, has the searched name.
function layerMatches(layer, words) {
  if (!words.length || holds(layer.label.toLowerCase(), words)) return true;
  return layer.parameters.some(({ name }) => holds(name.toLowerCase(), words));
}
