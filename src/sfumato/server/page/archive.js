// Conversations as a file: written, and read again with every value looked at, since the file may come from a stranger.
// What is wrong in a conversation is left out where the rest makes sense without it. Knows data alone.

const FORMAT = 'sfumato.conversations';
export const MOST_BYTES = 16_000_000; // of a file
const MOST = {
  turns: 2_000, text: 1_000_000, title: 200, name: 200, pictures: 16, picture: 2_000_000, files: 16, canvases: 1_000,
  drafts: 1_024, positions: 4_096, token: 200, warnings: 20,
};
const PICTURE = /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/]+={0,2}$/;

/** Conversations, [{ title, changed, turns }], as the text of a file. */
export const written = (conversations) => JSON.stringify({
  format: FORMAT, version: 1,
  conversations: conversations.map(({ title, changed, turns }) => ({ title, changed, turns })),
});

/** The conversations of a file's text. Raises an Error in words where it is none of ours. */
export function readArchive(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error('The file is no JSON.');
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error('The file holds no conversations of Sfumato.');
  }
  if (data.version !== 1) throw new Error(`The file has version ${JSON.stringify(data.version)?.slice(0, 20)}; this page reads version 1.`);
  const found = data.conversations.map(conversation).filter(Boolean);
  if (!found.length) throw new Error('The file holds no conversation that can be read.');
  return found;
}

const isText = (value, most) => typeof value === 'string' && value.length <= most;
const text = (value, most, otherwise = '') => (isText(value, most) ? value : otherwise);
const list = (value, most) => (Array.isArray(value) && value.length <= most ? value : []);
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const number = (value) => (Number.isFinite(value) ? value : undefined);

function conversation(value) {
  const turns = list(value?.turns, MOST.turns).map(turn).filter(Boolean);
  if (!turns.length) return null;
  return { title: text(value.title, MOST.title), changed: isCount(value.changed) ? value.changed : 0, turns };
}

function turn(value) {
  if (!isText(value?.content, MOST.text)) return null;
  if (value.role === 'user') {
    return {
      role: 'user', content: value.content,
      pictures: list(value.pictures, MOST.pictures).map(picture).filter(Boolean),
      files: list(value.files, MOST.files).filter((file) => isText(file?.text, MOST.text))
        .map(({ name, text: content }) => ({ name: text(name, MOST.name, 'file'), text: content })),
    };
  }
  if (value.role !== 'assistant') return null;
  const canvases = list(value.canvases, MOST.canvases).map(canvas);
  return {
    role: 'assistant', content: value.content, thought: text(value.thought, MOST.text),
    canvases: canvases.every(Boolean) ? canvases : [], // a replay has all of them, or none
    ...isCount(value.seed) && { seed: value.seed },
    ...isText(value.model, MOST.name) && { model: value.model },
    ...isText(value.finish, 20) && { finish: value.finish },
    ...isText(value.error, 2_000) && { error: value.error },
    ...value.stopped === true && { stopped: true },
    ...Array.isArray(value.warnings) && {
      warnings: list(value.warnings, MOST.warnings).filter((line) => isText(line, 2_000)),
    },
    ...isText(value.doubts, 2_000) && { doubts: value.doubts },
    ...timings(value.timings),
  };
}

function picture(value) {
  const isPicture = (url) => isText(url, MOST.picture) && PICTURE.test(url);
  if (!isPicture(value?.thumb)) return null;
  const { thumb, url } = value;
  return { name: text(value.name, MOST.name, 'picture'), thumb, ...isPicture(url) && { url } };
}

function timings(value) {
  const diffusion = value?.diffusion;
  if (!diffusion) return {};
  const steps = [diffusion.steps].flat().filter(isCount);
  return {
    timings: {
      predicted_per_second: number(value.predicted_per_second),
      diffusion: {
        steps, blocks: isCount(diffusion.blocks) ? diffusion.blocks : 1,
        ms_per_step: number(diffusion.ms_per_step), tokens_per_forward: number(diffusion.tokens_per_forward),
        convergence: list(diffusion.convergence, MOST.canvases).filter((one) => isText(one, 20)),
      },
    },
  };
}

function canvas(value) {
  const drafts = list(value?.drafts, MOST.drafts).map(draft);
  const isOne = value && isCount(value.maxSteps) && drafts.every((one) => one && one.ids.length === drafts[0].ids.length);
  if (!isOne) return null;
  const count = drafts[0]?.ids.length;
  const { settled, noise } = value;
  const isNoise = tokens(noise, count);
  if (settled && !(ids(settled.ids, settled.ids?.length) && tokens(settled.tokens, settled.ids.length))) return null;
  return {
    maxSteps: value.maxSteps, drafts,
    settled: settled ? {
      ids: settled.ids, tokens: settled.tokens, convergence: text(settled.convergence, 20), steps: number(settled.steps),
      ...ids(settled.doubted, settled.doubted?.length) && { doubted: settled.doubted },
    } : null,
    ...isNoise && { noise },
  };
}

function ids(value, count) {
  return Array.isArray(value) && value.length === count && count <= MOST.positions
    && value.every((id) => isCount(id) && id < 2 ** 31);
}

function tokens(value, count) {
  return Array.isArray(value) && value.length === count && value.every((token) => isText(token, MOST.token));
}

function draft(value) {
  const count = value?.ids?.length;
  const isOne = ids(value?.ids, count) && isCount(value.step) && tokens(value.tokens, count)
    && list(value.entropy, MOST.positions).length === count && value.entropy.every(Number.isFinite)
    && list(value.accepted, MOST.positions).length === count && value.accepted.every((flag) => flag === 0 || flag === 1);
  if (!isOne) return null;
  const { step, entropy, accepted, top } = value;
  return { step, ids: value.ids, tokens: value.tokens, entropy, accepted, top: topOf(top, count) };
}

/** The most probable tokens, as trace.js writes them; none where something is wrong with them. */
function topOf(value, count) {
  const size = isCount(value?.perPosition) ? value.perPosition * count : -1;
  const isOne = size >= 0 && list(value.ids, size).length === size && value.ids.every((id) => isCount(id) && id < 2 ** 31)
    && list(value.p, size).length === size && value.p.every((p) => Number.isFinite(p) && p >= 0 && p <= 1);
  return isOne ? { perPosition: value.perPosition, ids: value.ids, p: value.p } : [];
}
