// A small line of numbers over time. Knows no clock.

import { svg } from './dom.js';

const WIDTH = 300, HEIGHT = 56;

/** values: oldest first, null where nothing is known; count: how many fill the width. */
export function sparkline(values, count, label) {
  const most = Math.max(1e-9, ...values.map((value) => value ?? 0));
  const points = values.map((value, i) => {
    const x = WIDTH - (values.length - 1 - i) * (WIDTH / (count - 1));
    return `${x.toFixed(1)},${(HEIGHT - 2 - ((value ?? 0) / most) * (HEIGHT - 6)).toFixed(1)}`;
  });
  const first = WIDTH - (values.length - 1) * (WIDTH / (count - 1));
  return svg('svg', {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none',
    class: 'spark', role: 'img', 'aria-label': label,
  },
  svg('polyline', { points: `0,${HEIGHT - 1} ${WIDTH},${HEIGHT - 1}`, class: 'base' }),
  svg('polygon', { points: `${first},${HEIGHT} ${points.join(' ')} ${WIDTH},${HEIGHT}`, class: 'under' }),
  svg('polyline', { points: points.join(' ') }));
}
